// The keyboard: the list of shortcuts, and what they do.

import { h } from "./dom.js";
import { popover } from "./popovers.js";
import { termList } from "./terms.js";

const KEYS = [
  ["Space", "play or pause"],
  ["← →", "previous and next step"],
  ["Shift + ← →", "ten steps back and forward"],
  ["Home End", "first and last step"],
  ["P N", "previous and next event"],
  ["[ ]", "zoom the step axis out and in"],
  ["0", "show all steps"],
  ["1 2 3 4 5", "Story, Scheduler, Kernel, all panels, the incident of a recording"],
  ["A", "ask the model something"],
  ["E", "explain the step at the cursor in five scenes"],
  ["I", "step into the next phase of a step"],
  ["B", "breakpoints"],
  ["W", "what if: another configuration"],
  ["/ or Ctrl + K", "search: “long 700”, “step 12”, “preempted”, or a request"],
  ["C", "show or hide the comparison"],
  ["T", "show every panel as a table"],
  ["Esc", "close what is open, or follow the newest step"],
  ["?", "show this list"],
];

/** Fields in which letters are text, and the sliders of a form, which arrows move. */
const TYPING = "input:not([type=range], [type=checkbox]), textarea, .wb-form input[type=range]";

const PIN = "To keep this view in sight while cells run, right-click it in JupyterLab and choose “Create New View " +
  "for Cell Output”. A saved notebook keeps a picture of the run; view.freeze() keeps the whole page.";

/** The dialog that lists the shortcuts, and in a notebook how to pin the view. */
export function keyList(inNotebook) {
  const entries = KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]);
  const words = h("details", {}, h("summary", {}, "Words, and what they mean"), termList());
  const pin = inNotebook && h("p", {}, PIN);
  return popover("Keyboard shortcuts", h("dl", { class: "wb-keys" }, entries), pin, words);
}

/**
 * Bind the keys of a view. On a page that holds nothing else they work from the first moment; in a notebook only while
 * the view has the focus, and the notebook's own keys then rest: "d d" must not delete the cell.
 * @returns A function that unbinds them.
 */
export function bindKeys(root, view) {
  const { cursor, controls } = view;
  const actions = {
    " ": () => controls.togglePlay(),
    ArrowLeft: (event) => cursor.seek(cursor.step - (event.shiftKey ? 10 : 1)),
    ArrowRight: (event) => cursor.seek(cursor.step + (event.shiftKey ? 10 : 1)),
    Home: () => cursor.seek(0),
    End: () => cursor.seek(cursor.last),
    p: () => cursor.seekEvent(-1),
    n: () => cursor.seekEvent(1),
    "[": () => cursor.zoom(1.5),
    "]": () => cursor.zoom(1 / 1.5),
    0: () => cursor.fit(),
    1: () => view.show("story"),
    2: () => view.show("scheduler"),
    3: () => view.show("kernel"),
    4: () => view.show("all"),
    5: () => view.isIncident && view.show("incident"),
    "/": () => controls.search.focus(),
    a: () => view.ask(),
    e: () => view.film.show(),
    i: () => view.stepInto(),
    b: () => view.toggleBreakpoints(),
    w: () => view.toggleFork(),
    c: () => view.toggleCompare(),
    t: () => view.toggleTables(),
    "?": () => view.toggleHelp(),
    Escape: () => view.escape(),
  };
  const pressed = (event) => {
    const target = event.composedPath()[0], { key } = event;
    const take = (action) => {
      event.preventDefault();
      event.stopPropagation();
      action(event);
    };
    if ((event.ctrlKey || event.metaKey) && key.toLowerCase() === "k") return take(() => controls.search.focus());
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches?.(TYPING) && key !== "Escape") return;
    // A list takes the keys that open it and move in it; letters are shortcuts there as well.
    if (target.matches?.("select") && (key.length > 1 || key === " ") && key !== "Escape") return;
    // Space on a button presses the button.
    if (key === " " && target.matches?.("button, summary, input")) return;
    const action = actions[key.length === 1 ? key.toLowerCase() : key];
    if (action) take(action);
  };
  const keeper = view.options.page ? document : root;
  keeper.addEventListener("keydown", pressed);
  // JupyterLab looks at keys before anyone else, and leaves those alone whose target is in an element with this mark.
  // Shortcuts with Ctrl, such as saving, stay the notebook's.
  const mark = (event) => {
    root.toggleAttribute("data-lm-suppress-shortcuts", !event.ctrlKey && !event.metaKey);
  };
  globalThis.addEventListener("keydown", mark, true);
  return () => {
    keeper.removeEventListener("keydown", pressed);
    globalThis.removeEventListener("keydown", mark, true);
  };
}

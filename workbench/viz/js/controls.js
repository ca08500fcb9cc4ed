// Controls: the engine (run, pause, step, add a request) and, apart from it, the cursor that looks at its steps.

import { formatNumber, h, plain, setText } from "./dom.js";

const SPEEDS = [1, 4, 8, 20, 60];

export const KEYS = [
  ["Space", "play or pause the cursor"], ["← →", "one step back or on"], ["Shift + ← →", "ten steps"], ["Home End", "first and last step"],
  ["P N", "previous and next event"], ["[ ]", "zoom the step axis out and in"], ["0", "fit all steps"], ["I", "step into: the next phase of a step"], ["B", "breakpoints"], ["/", "filter requests"],
  ["C", "compare"], ["T", "every panel as a table"], ["Esc", "follow the newest step"], ["?", "this list"],
];

export class Controls {
  constructor(view) {
    this.view = view;
    const button = (label, title, onclick, more = {}) => h("button", { class: "wb-button", title, "aria-label": title, onclick, ...more }, label);
    const send = (name) => () => view.send(name);
    this.name = h("strong", { class: "wb-name" });
    this.badge = h("span", { class: "wb-badge" });
    this.run = button("Run", "Run the engine until nothing is left to do", send("start"), { class: "wb-button wb-primary" });
    this.pause = button("Pause", "Pause the engine after the step under way", send("pause"));
    this.stepEngine = button("Step", "Let the engine take one step", send("step"));
    this.into = button("Step into", "Take the next step phase by phase", () => view.stepInto());
    this.breakpoints = button("Breakpoints", "Pause the engine on a condition (B)", () => view.toggleBreakpoints());
    this.fork = button("What if", "The same run under another configuration from this step on", () => view.toggleFork());
    this.add = button("Add request", "Queue another request", () => this.toggleForm());
    this.engine = h("div", { class: "wb-group", role: "group", "aria-label": "Engine" }, this.run, this.pause, this.stepEngine, this.into, this.add, this.breakpoints, this.fork);
    this.play = button("▶", "Play the steps (Space)", () => this.togglePlay());
    this.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step at the cursor", oninput: () => view.cursor.seek(Number(this.slider.value)) });
    this.position = h("output", { class: "wb-position" });
    this.live = h("button", { class: "wb-button wb-live", title: "Go to the newest step and follow it (Esc)", onclick: () => view.cursor.toLive() }, "Follow");
    this.speed = h("select", { class: "wb-button", "aria-label": "Steps per second when playing", onchange: () => { view.cursor.speed = Number(this.speed.value); } },
      SPEEDS.map((n) => h("option", { value: n, selected: n === view.cursor.speed }, `${n}/s`)));
    this.speed.value = view.cursor.speed;
    this.axis = h("button", { class: "wb-button", title: "Steps or wall time on the horizontal axis", onclick: () => this.toggleAxis() }, "x: step");
    this.focusButton = button("Focus scheduled", "Give the six hues to requests that are scheduled at the cursor", () => view.focusScheduled());
    this.filter = h("input", { type: "search", placeholder: "filter requests", "aria-label": "Filter requests by id", oninput: () => { view.cursor.filter = this.filter.value; view.changed("data"); } });
    this.themeButton = button("◐", "Light or dark", () => view.nextTheme());
    this.help = button("?", "Keys", () => view.toggleHelp());
    this.announce = h("p", { class: "wb-announce", "aria-live": "polite" });
    this.message = h("p", { class: "wb-message", role: "alert", hidden: true });
    this.form = this.makeForm();
    this.element = h("div", { class: "wb-controls" },
      h("div", { class: "wb-bar" }, h("div", { class: "wb-title" }, this.name, this.badge), this.engine, h("span", { class: "wb-space" }), this.filter, this.focusButton, this.axis, this.themeButton, this.help),
      h("div", { class: "wb-bar wb-transport", role: "group", "aria-label": "Cursor" },
        button("|◀", "First step (Home)", () => view.cursor.seek(0)), button("◀", "One step back (←)", () => view.cursor.seek(view.cursor.step - 1)), this.play,
        button("▶|", "One step on (→)", () => view.cursor.seek(view.cursor.step + 1)), this.slider, this.position, this.speed, this.live),
      this.form, this.message, this.announce);
  }

  makeForm() {
    this.prompt = h("textarea", { rows: 2, placeholder: "Prompt", "aria-label": "Prompt" });
    const number = (name, value, step, title) => h("label", { title }, name, h("input", { type: "number", name, value, step, class: "wb-number-input" }));
    this.fields = [number("max_tokens", 48, 1, "Output tokens at most"), number("temperature", 0, 0.1, "0 is greedy"), number("priority", 0, 1, "Smaller is served first under the priority policy")];
    return h("form", { class: "wb-form", hidden: true, onsubmit: (event) => {
      event.preventDefault();
      const values = Object.fromEntries(this.fields.map((label) => [label.lastChild.name, Number(label.lastChild.value)]));
      this.view.send("add_request", { prompt: this.prompt.value, ...values });
    } }, this.prompt, this.fields, h("button", { class: "wb-button wb-primary", type: "submit" }, "Add"));
  }

  toggleForm() {
    this.form.hidden = !this.form.hidden;
    if (!this.form.hidden) this.prompt.focus();
  }

  togglePlay() {
    const { cursor } = this.view;
    cursor.playing = !cursor.playing;
    if (cursor.playing) {
      cursor.follow = false;
      if (cursor.step >= cursor.last) cursor.seek(0);
      this.view.startPlaying();
    }
    this.update();
  }

  toggleAxis() {
    const { cursor, store } = this.view;
    cursor.axis = cursor.axis === "step" && store.timed() ? "time" : "step";
    this.axis.textContent = `x: ${cursor.axis}`;
    this.view.changed("range");
  }

  update() {
    const { view } = this, { store, cursor, status } = view;
    setText(this.name, plain(status.name || store.facts.model?.name || "Trace", 40));
    const live = view.live, state = status.state || "recording";
    this.engine.hidden = !live;
    const stopped = state === "paused" && status.stopped_by?.[0] === store.label(cursor.last) ? `: ${plain(status.stopped_by[1], 40)}` : "";
    setText(this.badge, live ? `live · ${state}${stopped}` : `${plain(store.facts.source || "recording", 30)} · recording`);
    this.badge.dataset.state = live ? state : "recording";
    this.run.disabled = state === "running";
    this.pause.disabled = state !== "running";
    this.stepEngine.disabled = this.into.disabled = state === "running";
    this.into.hidden = !view.can("step_into");
    this.breakpoints.hidden = !view.can("breakpoints");
    this.fork.hidden = !view.can("fork") || !store.numSteps;
    this.axis.hidden = !store.timed();
    setText(this.play, cursor.playing ? "❚❚" : "▶");
    this.slider.max = cursor.last;
    this.slider.value = cursor.step;
    this.slider.disabled = store.numSteps < 2;
    const position = !store.numSteps ? "no steps yet" : cursor.scrubbed
      ? (live ? `viewing ${formatNumber(store.label(cursor.step))}, engine at ${formatNumber(store.label(cursor.last))}` : `step ${formatNumber(store.label(cursor.step))} of ${formatNumber(store.label(cursor.last))}`)
      : `step ${formatNumber(store.label(cursor.step))}`;
    setText(this.position, position);
    this.live.hidden = cursor.follow || !store.numSteps;
    setText(this.live, live ? "Follow" : "Go to end");
    this.message.hidden = !status.message;
    setText(this.message, status.message || "");
  }

  /** Say the step for a screen reader, not more than about once a second. */
  say(text) {
    clearTimeout(this.saying);
    this.saying = setTimeout(() => setText(this.announce, text), 900);
  }
}

/** Keyboard: bound to the view's root, so that a notebook's own keys keep working outside it. */
export function bindKeys(root, view) {
  root.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input:not([type=range]), textarea, select");
    if (typing && event.key !== "Escape") return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { cursor, controls } = view;
    const onButton = event.target.matches?.("button");
    const actions = {
      " ": () => controls.togglePlay(),
      ArrowLeft: () => cursor.seek(cursor.step - (event.shiftKey ? 10 : 1)), ArrowRight: () => cursor.seek(cursor.step + (event.shiftKey ? 10 : 1)),
      Home: () => cursor.seek(0), End: () => cursor.seek(cursor.last), p: () => cursor.seekEvent(-1), n: () => cursor.seekEvent(1),
      "[": () => cursor.zoom(1.5), "]": () => cursor.zoom(1 / 1.5), 0: () => cursor.fit(), "/": () => controls.filter.focus(), i: () => view.stepInto(), b: () => view.toggleBreakpoints(),
      c: () => view.toggleCompare(), t: () => view.toggleTables(), "?": () => view.toggleHelp(), Escape: () => view.escape(),
    };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key === " " && onButton) return;
    const action = actions[key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}

export function keyList() {
  return h("dl", { class: "wb-keys" }, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
}

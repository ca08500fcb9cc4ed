// Dialogs over the view: the common frame, and breakpoints.

import { counted, h, plain, replace, select } from "./dom.js";

const CONDITIONS = {
  preemption: { label: "a request is preempted", fields: [] },
  free_blocks: { label: "free blocks fall below", fields: [["blocks", "number"]] },
  num_kv_computed: {
    label: "computed tokens of a request reach",
    fields: [["request_id", "text"], ["tokens", "number"]],
  },
  block: { label: "a block is taken", fields: [["block", "number"]] },
};

/** A hidden dialog with a title. */
export function popover(title, ...children) {
  const props = { class: "wb-popover", hidden: true, role: "dialog", "aria-label": title, tabindex: -1 };
  return h("div", props, h("h3", {}, title), children);
}

/**
 * Open a dialog below the button it belongs to, in place of another one that is open, and move the focus into it;
 * closing it gives the focus back.
 */
export function openBelow(element, button) {
  element.closest(".wb-root")?.querySelectorAll(".wb-popover").forEach(close);
  element.hidden = false;
  element.opener = button;
  place(element);
  (element.querySelector("input, select, textarea, button") || element).focus({ preventScroll: true });
}

/** Put an open dialog below its button or at its side, on the screen; again whenever its content has grown. */
export function place(element) {
  const frame = element.offsetParent, { opener } = element;
  if (!frame || !opener) return;
  const box = frame.getBoundingClientRect(), at = opener.getBoundingClientRect();
  const most = Math.max(0, box.width - element.offsetWidth - 4), top = at.bottom + 6;
  const left = element.dataset.side === "right" ? most : Math.min(at.left - box.left, most);
  element.style.left = `${Math.max(0, left)}px`;
  element.style.top = `${top - box.top}px`;
  element.style.maxHeight = `${Math.max(160, innerHeight - top - 12)}px`;
}

export function close(element) {
  if (element.hidden) return false;
  const had = element.contains(element.getRootNode().activeElement);
  element.hidden = true;
  if (had) element.opener?.focus({ preventScroll: true });
  return true;
}

/** A form that calls `submit` instead of leaving the page. */
export function form(props, submit, ...children) {
  const onsubmit = (event) => {
    event.preventDefault();
    submit();
  };
  return h("form", { ...props, onsubmit }, children);
}

export function submitButton(label) {
  return h("button", { class: "wb-button wb-primary", type: "submit" }, label);
}

export class BreakpointsForm {
  constructor(view) {
    this.view = view;
    const conditions = Object.entries(CONDITIONS).map(([kind, { label }]) => [kind, label]);
    this.kind = select("Condition", conditions, () => this.showFields());
    this.fields = h("span", { class: "wb-group" });
    this.list = h("ul", { class: "wb-list" });
    const add = form({ class: "wb-form" }, () => this.add(), this.kind, this.fields, submitButton("Set"));
    this.element = popover("Pause the engine when", add, this.list);
    this.showFields();
  }

  /** Show the fields of the chosen condition. */
  showFields() {
    const input = ([name, type]) => {
      const words = { placeholder: name.replace("_", " "), "aria-label": name };
      return h("input", { name, type, required: true, min: 1, ...words });
    };
    replace(this.fields, CONDITIONS[this.kind.value].fields.map(input));
  }

  add() {
    const args = { kind: this.kind.value };
    for (const { name, type, value } of this.fields.querySelectorAll("input")) {
      args[name] = type === "number" ? Number(value) : value;
    }
    this.view.send("add_breakpoint", args);
  }

  update({ breakpoints = [] }) {
    const signature = JSON.stringify(breakpoints);
    if (signature === this.signature) return;
    this.signature = signature;
    const item = ([number, label, hits]) => {
      const remove = () => this.view.send("remove_breakpoint", { number });
      return h(
        "li",
        {},
        h("bdi", {}, plain(label, 80)),
        h("span", { class: "wb-hint" }, ` paused ${counted(hits, "time")} `),
        h("button", { class: "wb-quiet", onclick: remove }, "Remove"),
      );
    };
    const none = h("li", { class: "wb-hint" }, "No breakpoints.");
    replace(this.list, breakpoints.length ? breakpoints.map(item) : none);
  }
}

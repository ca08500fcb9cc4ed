// Small forms over the view: breakpoints and "what if" forks.

import { h, plain, replace } from "./dom.js";

const KINDS = {
  preemption: { label: "a request is preempted", fields: [] },
  free_blocks: { label: "free blocks fall below", fields: [["blocks", "number"]] },
  num_kv_computed: { label: "tokens in KV of a request reach", fields: [["request_id", "text"], ["tokens", "number"]] },
  block: { label: "a block is taken", fields: [["block", "number"]] },
};

const FORK_FIELDS = ["max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills", "num_blocks"];

function popover(title, ...children) {
  return h("div", { class: "wb-popover", hidden: true, role: "dialog", "aria-label": title }, h("h3", {}, title), children);
}

export class BreakpointsForm {
  constructor(view) {
    this.view = view;
    this.kind = h("select", { class: "wb-button", "aria-label": "Condition", onchange: () => this.showFields() }, Object.entries(KINDS).map(([kind, { label }]) => h("option", { value: kind }, label)));
    this.fields = h("span", { class: "wb-group" });
    this.list = h("ul", { class: "wb-list" });
    this.element = popover("Pause the engine when", h("form", { class: "wb-form", onsubmit: (event) => {
      event.preventDefault();
      const values = Object.fromEntries([...this.fields.querySelectorAll("input")].map((input) => [input.name, input.type === "number" ? Number(input.value) : input.value]));
      view.send("add_breakpoint", { kind: this.kind.value, ...values });
    } }, this.kind, this.fields, h("button", { class: "wb-button wb-primary", type: "submit" }, "Set")), this.list);
    this.showFields();
  }

  showFields() {
    replace(this.fields, KINDS[this.kind.value].fields.map(([name, type]) => h("input", { name, type, required: true, min: 1, placeholder: name.replace("_", " "), "aria-label": name })));
  }

  update(status) {
    const breakpoints = status.breakpoints || [], signature = JSON.stringify(breakpoints);
    if (signature === this.signature) return;
    this.signature = signature;
    replace(this.list, breakpoints.map(([number, label, hits]) => h("li", {}, h("bdi", {}, plain(label, 80)), h("span", { class: "wb-hint" }, ` paused ${hits} time${hits === 1 ? "" : "s"} `),
      h("button", { class: "wb-quiet", onclick: () => this.view.send("remove_breakpoint", { number }) }, "Remove"))),
    breakpoints.length ? null : h("li", { class: "wb-hint" }, "No breakpoints."));
  }
}

export class ForkForm {
  constructor(view) {
    this.view = view;
    this.inputs = FORK_FIELDS.map((name) => h("label", {}, name, h("input", { name, type: "number", min: 0 })));
    this.where = h("p", { class: "wb-hint" });
    this.element = popover("What if, from this step on", this.where, h("form", { class: "wb-form wb-column", onsubmit: (event) => {
      event.preventDefault();
      const config = view.store.facts.config, changes = {};
      for (const label of this.inputs) {
        const { name, value } = label.lastChild;
        if (value !== "" && Number(value) !== config[name]) changes[name] = Number(value);
      }
      view.send("fork", { at_step: view.store.label(view.cursor.step), changes });
      this.element.hidden = true;
    } }, this.inputs, h("button", { class: "wb-button wb-primary", type: "submit" }, "Simulate")));
  }

  open() {
    const { config } = this.view.store.facts;
    for (const label of this.inputs) label.lastChild.value = config[label.lastChild.name] ?? "";
    this.where.textContent = `The same arrivals and sampled tokens, under another configuration from step ${this.view.store.label(this.view.cursor.step)} on, simulated and shown beside the run.`;
    this.element.hidden = false;
  }
}

// Sliders and switches for fields of EngineConfig. A slider moves between usual values; the engine checks every value.

import { h } from "./elements.js";
import { explained, meaningOf } from "./terms.js";

/**
 * Fields with the values between which their slider moves, null is "off"; the term that explains it, and what it adds.
 * @type {[string, string, (number | null)[], string, string?][]}
 */
const SLIDERS = [
  ["max_num_batched_tokens", "Token budget", [
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    2048,
    4096,
    8192,
  ], "budget"],
  ["max_num_seqs", "Seats", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128], "seat"],
  [
    "num_blocks",
    "KV blocks",
    [16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096],
    "pool",
  ],
  ["block_size", "Block size", [1, 2, 4, 8, 16, 32, 64, 128], "block", "Tokens in a block."],
  [
    "long_prefill_token_threshold",
    "Chunk cap",
    [0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024],
    "chunk",
    "Maximum number of tokens in a chunk of a prompt.",
  ],
  [
    "max_num_partial_prefills",
    "Partial prefills",
    [null, 1, 2, 3, 4, 6, 8],
    "prefill",
    "Maximum number of prompts that are in progress together.",
  ],
  [
    "max_long_partial_prefills",
    "Of these, long",
    [null, 1, 2, 3, 4],
    "prefill",
    "Maximum number of long prompts among them: those longer than the chunk cap.",
  ],
];

const SWITCHES = [
  ["enable_prefix_caching", "Prefix caching", "prefix caching"],
  [
    "async_scheduling",
    "Asynchronous scheduling",
    "",
    "The scheduler chooses the next step while the model computes this one.",
  ],
];

const words = (name, value) =>
  value === null || (name === "long_prefill_token_threshold" && !value) ? "off" : value.toLocaleString("en");

export class Settings {
  /**
   * @param {HTMLElement} sliders
   * @param {HTMLElement} switches
   * @param {() => void} changed Called when a person moves a control.
   */
  constructor(sliders, switches, changed) {
    this.base = {}; // the configuration of the workload
    this.config = {}; // the fields that a person has changed
    this.controls = [];
    for (const [name, title, values, term, more] of SLIDERS) {
      const words = explained(title, term, more, name);
      const range = h("input", { type: "range", min: 0, step: 1, name, "aria-description": meaningOf(words) });
      const shown = h("output", {});
      const control = { name, range, shown, values, steps: values };
      range.addEventListener("input", () => {
        this.set(name, control.steps[Number(range.value)]);
        changed();
      });
      this.controls.push(control);
      sliders.append(h("label", { class: "slider" }, words, range, shown));
    }
    this.switches = SWITCHES.map(([name, title, term, more]) => {
      const words = explained(title, term, more, name);
      const box = h("input", { type: "checkbox", name, "aria-description": meaningOf(words) });
      box.addEventListener("input", () => {
        this.set(name, box.checked);
        changed();
      });
      switches.append(h("label", { class: "switch" }, box, words));
      return { name, box };
    });
  }

  set(name, value) {
    if (value === this.base[name]) delete this.config[name];
    else this.config[name] = value;
    this.show();
  }

  /** Begin from another configuration; what a person has changed is kept where given. */
  begin(base, config = {}) {
    this.base = base;
    this.config = { ...config };
    for (const control of this.controls) {
      const values = [...control.values, base[control.name] ?? null, this.config[control.name] ?? undefined];
      const numbers = values.filter((value) => typeof value === "number");
      control.steps = [...new Set(numbers)].sort((a, b) => a - b);
      if (control.values.includes(null)) control.steps.unshift(null);
      control.range.max = String(control.steps.length - 1);
    }
    this.show();
  }

  value(name) {
    return this.config[name] !== undefined ? this.config[name] : this.base[name] ?? null;
  }

  show() {
    for (const { name, range, shown, steps } of this.controls) {
      const value = this.value(name);
      range.value = String(Math.max(0, steps.indexOf(value)));
      shown.textContent = typeof value === "string" ? value : words(name, value);
      range.setAttribute("aria-valuetext", shown.textContent);
      range.closest("label").classList.toggle("changed", name in this.config);
    }
    for (const { name, box } of this.switches) {
      box.checked = Boolean(this.value(name));
      box.closest("label").classList.toggle("changed", name in this.config);
    }
  }
}

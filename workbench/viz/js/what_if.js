// The same requests under another configuration, simulated. Moving a slider simulates the run again, which takes a
// fraction of a second; the result appears beside the run, and one sentence says what has changed.

import { formatNumber, h, replace, select, setText, table } from "./dom.js";
import { close, form, openBelow, place, popover, submitButton } from "./popovers.js";
import { RouterDuel } from "./router_duel.js";

/**
 * The fields: name, words, and the values between which a slider moves. 0 turns a cap off.
 * @type {any[][]}
 */
const FIELDS = [
  ["max_num_batched_tokens", "token budget", [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192]],
  ["max_num_seqs", "seats", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256]],
  ["num_blocks", "KV blocks", [32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 16384]],
  ["long_prefill_token_threshold", "chunk cap", [0, 16, 32, 48, 64, 96, 128, 160, 192, 256, 512, 1024]],
];

/** @type {any} The policies by name, each with its words. */
const POLICIES = "__POLICIES__";

/** @type {any} The measures of a duel, each with the words that say what wins. */
const MEASURES = "__MEASURES__";

/** Milliseconds without a movement after which a simulation is asked for. */
const REST_MS = 120;

const NOT_YET = "Not simulated yet: press Simulate, or let the class bet.";
const FROM_FIRST = "A duel is about the whole run: let it begin with the first step.";
const AS_IT_WAS = "These are the settings of the run.";
const IN_USE = "KV blocks keep their number here: at a later step than the first they are in use.";

export class WhatIf {
  constructor(view) {
    this.view = view;
    this.run = null; // the run whose settings the sliders began with; hosts of one run give it no number
    this.moved = false; // whether the values are not those of an answer
    this.sliders = FIELDS.map(([name, words, values]) => this.slider(name, words, values));
    this.policy = select("policy", POLICIES, () => this.changed());
    const where = [["first", "from the first step"], ["cursor", "from the step at the cursor"]];
    this.from = select("Begin", where, () => this.changed());
    this.verdict = h("p", { class: "wb-verdict", role: "status" });
    this.measures = h("div", { class: "wb-measures" });
    const policy = h("label", { class: "wb-slider" }, h("span", {}, "policy"), this.policy);
    const from = h("label", { class: "wb-slider" }, h("span", {}, "begin"), this.from);
    const again = h("button", { class: "wb-button", type: "button", onclick: () => this.asItWas() }, "As it was");
    this.measure = select("Measure", MEASURES, () => {});
    const bet = h("button", { class: "wb-button", type: "button", onclick: () => this.bet() }, "Let the class bet");
    bet.title = "A duel: the class bets on this run or the other configuration before it is simulated";
    this.routers = new RouterDuel((routers, measure) => this.put({ changes: {}, measure, routers }));
    this.duel = h("div", { class: "wb-bar", hidden: true }, this.measure, bet);
    const bar = h("div", { class: "wb-bar" }, submitButton("Simulate"), again);
    this.inUse = h("p", { class: "wb-hint", hidden: true }, IN_USE);
    const fields = [this.sliders.map((slider) => slider.element), policy, from, this.inUse];
    const fork = form(
      { class: "wb-form wb-column" },
      () => this.ask(),
      fields,
      bar,
      this.duel,
      this.routers.element,
      this.verdict,
      this.measures,
    );
    const hint = "The same arrivals and sampled tokens under another configuration, simulated.";
    this.element = popover("What if", h("p", { class: "wb-hint" }, hint), fork);
  }

  slider(name, words, values) {
    const range = h("input", { type: "range", min: 0, step: 1, "aria-label": words });
    const exact = h("input", { type: "number", name, min: 0, class: "wb-number-input", "aria-label": name });
    const element = h("label", { class: "wb-slider", title: name }, h("span", {}, words), range, exact);
    const slider = { name, range, exact, element, steps: values, before: undefined };
    range.addEventListener("input", () => {
      exact.value = slider.steps[Number(range.value)];
      this.changed();
    });
    exact.addEventListener("input", () => {
      this.place(slider);
      this.changed();
    });
    return slider;
  }

  /** Put the handle of a slider at the value of its field. */
  place({ range, exact, steps }) {
    const value = Number(exact.value), at = steps.findIndex((step) => step >= value);
    range.value = at < 0 ? steps.length - 1 : at;
  }

  open(button) {
    if (this.run !== this.view.store.facts.run) this.reset();
    if (!this.moved) this.showChanges(this.refusal ?? this.view.comparison?.fork);
    this.duel.hidden = this.view.classroom.facts.role !== "teacher";
    this.routers.offer(this.view.classroom.facts.routers);
    if (this.moved) this.rest();
    else if (!this.refusal) this.update(this.view.comparison || {});
    openBelow(this.element, button);
    this.makeRoom({ isOpening: true });
  }

  /**
   * Leave the comparison in sight: the box moves to the right, beside the numbers, and on a narrow view it closes as
   * its answer comes, unless a person is typing a number into it.
   */
  makeRoom({ isOpening = false } = {}) {
    const { element, view } = this, isNarrow = view.root.dataset.narrow === "true";
    element.dataset.side = view.comparing && !isNarrow ? "right" : "";
    if (element.hidden) return;
    const types = element.getRootNode().activeElement?.matches("input[type=number]");
    if (view.comparing && isNarrow && !isOpening && !types) close(element);
    else place(element);
  }

  /** The values of the run. */
  reset() {
    const { facts } = this.view.store;
    this.run = facts.run;
    this.moved = false;
    FIELDS.forEach(([name, , values], i) => {
      const slider = this.sliders[i], value = facts.config[name] ?? 0;
      slider.before = value;
      slider.steps = [...new Set([...values, value])].sort((a, b) => a - b);
      slider.range.max = slider.steps.length - 1;
      slider.exact.value = value;
      this.place(slider);
    });
    const known = POLICIES.some(([policy]) => policy === facts.config.policy);
    if (!known && facts.config.policy) replace(this.policy, h("option", { value: "" }, "as it was"));
    else this.policy.value = facts.config.policy || "fcfs";
    this.from.value = "first";
    this.fitBegin();
  }

  /** A simulation from a later step on takes the blocks that are in use there. */
  fitBegin() {
    const isLater = this.from.value !== "first", slider = this.sliders.find(({ name }) => name === "num_blocks");
    this.inUse.hidden = !isLater;
    for (const input of [slider.range, slider.exact]) input.disabled = isLater;
    if (!isLater) return;
    slider.exact.value = slider.before;
    this.place(slider);
  }

  /** Put every slider back, and simulate that. */
  asItWas() {
    this.reset();
    this.changed();
  }

  /** The values of the simulation on display or of the one that was refused, also when it was asked for elsewhere. */
  showChanges(asked) {
    if (!asked) return;
    for (const slider of this.sliders) {
      slider.exact.value = asked.changes?.[slider.name] ?? slider.before;
      this.place(slider);
    }
  }

  /** A slider has moved. A teacher's class may bet on the result, so it is not shown by itself. */
  changed() {
    this.fitBegin();
    clearTimeout(this.timer);
    this.expect(null);
    this.moved = true; // the values stay until an answer to others comes
    if (this.duel.hidden) this.timer = setTimeout(() => this.ask(), REST_MS);
    else this.rest();
  }

  /** Nothing is simulated until a teacher says so: no older answer stays beside the values. */
  rest() {
    setText(this.verdict, Object.keys(this.changes()).length ? NOT_YET : AS_IT_WAS);
    if (this.view.comparing) this.view.showComparison(false);
  }

  /** The fields that differ from the run. */
  changes() {
    const { config } = this.view.store.facts, result = {};
    for (const { name, exact, before } of this.sliders) {
      const value = Number(exact.value);
      if (exact.value !== "" && value !== before) result[name] = value;
    }
    if (this.policy.value && this.policy.value !== (config.policy || "fcfs")) result.policy = this.policy.value;
    return result;
  }

  /** Ask for the simulation. */
  ask() {
    clearTimeout(this.timer);
    const { store, cursor } = this.view;
    const at = this.from.value === "first" ? 0 : store.label(cursor.step);
    this.view.simulate(at, this.changes(), { scroll: true });
  }

  bet() {
    if (this.from.value !== "first") return setText(this.verdict, FROM_FIRST);
    this.put({ changes: this.changes(), measure: this.measure.value });
  }

  /** Put a duel to the class; nothing is simulated before the bets are made. */
  put(duel) {
    clearTimeout(this.timer);
    this.expect(null);
    this.view.send("class", { what: "bet", ...duel });
    close(this.element);
  }

  /** Changes from a step on that an answer is expected to; null if they are still being moved. */
  expect(asked) {
    this.asked = asked;
    this.update({});
    setText(this.verdict, asked || this.duel.hidden ? "…" : "");
  }

  /** The host may have refused what was asked: its reason is here, and no older simulation is shown as the answer. */
  follow({ not_simulated: refusal }) {
    const { asked } = this;
    if (!asked || !refusal || asked.step !== refusal.at_step) return;
    if (JSON.stringify(asked.changes) !== JSON.stringify(refusal.changes)) return;
    this.asked = null;
    this.update({ refused: refusal.reason });
    this.refusal = refusal;
    this.view.showComparison(false);
  }

  /** Whether the open box, which covers the bars, says this already. */
  tells(message) {
    return !this.element.hidden && this.refusal?.reason === message;
  }

  /** The simulation has arrived, or cannot be compared. */
  update(comparison) {
    this.refusal = null;
    if (comparison.refused || comparison.fork) this.moved = false;
    setText(this.verdict, comparison.refused || comparison.verdict || "");
    this.verdict.dataset.kind = comparison.refused ? "problem" : "";
    fillMeasures(this.measures, comparison, this.view); // also in the comparison, which the box may cover
    if (!this.element.hidden) place(this.element);
  }
}

/** Mean, P99 and throughput of both runs, a row each with the change as text. */
export function fillMeasures(element, { measures = [], fork }, view) {
  element.hidden = !measures.length;
  // With a fork, B is the simulated run, and A is too where this run had not ended or times are predicted. A saved page
  // may draw either of two runs.
  const how = fork?.predicted ? "predicted" : "simulated";
  const simulated = view.unchanged ? [`A: as it was, ${how}`, `B: changed, ${how}`] : ["A: this run", "B: simulated"];
  const sides = fork && !view.drawsSecond ? simulated : ["A", "B"];
  replace(element, table(["measure", ...sides, "change"], measures));
}

/** The step and the fields in which a simulated run differs, as words. */
export function forkWords({ at_step: step, changes }) {
  const named = Object.entries(changes || {}).map(([name, value]) => {
    const field = FIELDS.find(([known]) => known === name);
    if (name === "policy") return `policy ${POLICIES.find(([known]) => known === value)?.[1] ?? value}`;
    return `${field ? field[1] : name} ${typeof value === "number" ? formatNumber(value) : value}`;
  });
  return `${step ? `from step ${formatNumber(step)}` : "from the first step"} with ${named.join(", ") || "no change"}`;
}

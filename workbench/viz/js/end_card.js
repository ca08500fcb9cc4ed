// The card at the end of a run: its totals, and what to do next.

import { counted, formatNumber, formatSeconds, h, median, setText } from "./dom.js";
import { heldOf } from "./words.js";

const SMALL_BUDGET = 32;

export class EndCard {
  constructor(view) {
    this.view = view;
    this.totals = h("p", {});
    this.dismissed = 0; // number of steps of the run at which it was closed
    const button = (words, title, onclick) =>
      h("button", { class: "wb-button", type: "button", title, onclick }, words);
    this.budget = button("", "Simulate the same requests with a smaller token budget", () => this.tryBudget());
    this.ask = button("Ask your own", "Ask the model something (A)", () => view.ask());
    this.save = button("Save HTML", "", () => view.place.savePage());
    this.link = view.linkBox.button();
    const close = h("button", { class: "wb-quiet", type: "button", onclick: () => this.close() }, "Close");
    const replay = button("Replay", "Play the run from its first step", () => this.replay());
    const buttons = h("div", { class: "wb-bar" }, replay, this.ask, this.budget, this.save, this.link, close);
    const props = { class: "wb-end-card", hidden: true, "aria-label": "The run is over" };
    this.element = h("section", props, h("h3", {}, "Every request is finished."), this.totals, buttons);
  }

  update() {
    const { store, status, live, cursor, whole, comparing } = this.view,
      over = live && status.state === "idle" && store.numSteps > 1;
    const count = store.label(store.numSteps);
    const hidden = !over || !whole || cursor.playing || comparing || this.dismissed === count;
    this.element.hidden = hidden;
    this.ask.hidden = !this.view.may("ask");
    this.budget.hidden = !this.view.can("fork") || store.label(0) > 0;
    if (hidden || this.shown === count) return;
    this.shown = count;
    setText(this.totals, this.words());
    this.smaller = Math.min(SMALL_BUDGET, Math.floor(store.facts.config.max_num_batched_tokens / 2) || 1);
    setText(this.budget, `Try a budget of ${formatNumber(this.smaller)}`);
    this.save.hidden = !this.view.can("save_html");
    this.save.title = `Save ${heldOf(store)} as one page that opens offline`;
  }

  /** The totals of the run, or of what it has kept; of a prompt it may have kept the last chunk alone. */
  words() {
    const { store } = this.view, last = store.numSteps - 1;
    let prompt = 0, output = 0;
    for (const request of store.requests) {
      prompt += request.num_prompt_tokens;
      output += request.tokens.length;
    }
    const prompts = store.isPart ? "" : `, ${counted(prompt, "prompt token")}`;
    const kept = store.isPart ? ` that are kept, ${heldOf(store)}` : "";
    const what = `${counted(store.requests.length, "request")}${prompts} and ${counted(output, "output token")} in ` +
      `${counted(store.numSteps, "step")}${kept}${kept && store.timed() ? "," : ""}`;
    const { atWork, idle } = store.clock, without = idle ? ` without ${formatSeconds(idle)} idle` : "";
    if (!store.timed()) return `${what}.`;
    const latency = store.column("chunk.latency"), flags = store.column("chunk.flags"), firsts = [];
    const [, end] = store.span("chunk", last);
    for (let c = 0; c < end; c++) {
      if (flags[c] & store.facts.codes.first_token && !Number.isNaN(latency[c])) firsts.push(latency[c]);
    }
    firsts.sort((a, b) => a - b);
    const first = firsts.length ? `; first token after ${formatSeconds(median(firsts))} (median)` : "";
    const rate = `${formatNumber(output / atWork)} output tokens per second`;
    return `${what} and ${formatSeconds(atWork)}${without}${first}; ${rate}.`;
  }

  replay() {
    const { cursor } = this.view;
    cursor.seek(0);
    if (!cursor.playing) cursor.togglePlay();
    this.view.changed("step");
  }

  tryBudget() {
    this.view.simulate(0, { max_num_batched_tokens: this.smaller }, { scroll: true });
  }

  close() {
    const { store } = this.view;
    this.dismissed = store.label(store.numSteps);
    this.view.changed("status");
  }
}

// A duel of two routers, which a teacher puts to the class: the requests of the run, over replicas of its engine.

import { h, replace, select, setText } from "./dom.js";

export class RouterDuel {
  /** @param bet Called with the routers of both sides, the number of replicas and the measure. */
  constructor(bet) {
    this.a = select("Router of A", [], () => this.explain());
    this.b = select("Router of B", [], () => this.explain());
    this.rules = [h("p", { class: "wb-hint" }), h("p", { class: "wb-hint" })];
    this.measure = select("Measure of the routers", [], () => {});
    this.replicas = h("input", {
      type: "number",
      class: "wb-number-input",
      min: 2,
      value: 4,
      "aria-label": "replicas",
    });
    const go = () => {
      const routers = { a: this.a.value, b: this.b.value, replicas: Number(this.replicas.value) };
      bet(routers, this.measure.value);
    };
    const button = h("button", { class: "wb-button", type: "button", onclick: go }, "Bet on two routers");
    button.title = "A duel of two routers: both sides are simulated after the bets";
    const hint = "Or two routers: the requests of this run, over replicas with its settings, both sides simulated.";
    this.element = h(
      "div",
      { hidden: true },
      h("p", { class: "wb-hint" }, hint),
      h("div", { class: "wb-bar" }, "A", this.a, "B", this.b, this.replicas, "replicas"),
      this.rules,
      h("div", { class: "wb-bar" }, this.measure, button),
    );
  }

  /** Offer what the host offers to a teacher; nothing to others. */
  offer(offered) {
    this.element.hidden = !offered;
    if (!offered || this.offered) return;
    this.offered = offered;
    const options = (pairs) => pairs.map(([value, words]) => h("option", { value }, words));
    for (const side of [this.a, this.b]) replace(side, options(offered.names.map((name) => [name, name])));
    [this.a.value, this.b.value] = offered.usual;
    replace(this.measure, options(offered.measures));
    this.replicas.max = offered.most;
    this.explain();
  }

  /** Say what the chosen routers do. */
  explain() {
    [this.a, this.b].forEach(({ value }, i) => setText(this.rules[i], `${"AB"[i]}: ${this.offered.rules[value]}.`));
  }
}

// Attention weights of one row of a captured layer, over the text.

import { formatNumber, h, plain, replace, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { inkOn, mix } from "./theme.js";

export class WeightsPanel extends Panel {
  constructor(view) {
    super(view, { id: "weights", title: "Attention weights", hint: "the darker a token, the more the row looks at it (square root)" });
    this.layer = h("input", { type: "number", min: 0, value: 0, class: "wb-number-input", "aria-label": "Layer" });
    this.capture = h("button", { class: "wb-button", onclick: () => view.send("capture", { layer: Number(this.layer.value) }) }, "Capture the next step");
    this.row = h("select", { class: "wb-button", "aria-label": "Row", onchange: () => view.send("show_weights", { row: Number(this.row.value) }) });
    this.head = h("select", { class: "wb-button", "aria-label": "Head", onchange: () => this.redraw() });
    this.words = h("p", { class: "wb-facts" });
    this.text = h("div", { class: "wb-weights wb-scroll", tabindex: 0 });
    this.body.append(h("div", { class: "wb-bar" }, h("label", {}, "layer ", this.layer), this.capture, this.row, this.head), this.words, this.text);
  }

  redraw() {
    this.stale.add("data");
    this.signature = "";
    this.view.requestFrame();
  }

  render() {
    const { status } = this.view, captured = status.capture;
    this.element.hidden = !this.view.can("capture");
    if (this.element.hidden) return;
    this.row.hidden = this.head.hidden = !captured || captured.step < 0;
    if (!status.weights) setText(this.words, !captured ? "Choose a layer; the next step keeps what its attention was handed."
      : captured.step < 0 ? `Layer ${captured.layer} will be kept in the next step.` : `Layer ${captured.layer} of step ${captured.step}. Choose a row.`);
    this.fillRows(captured);
    this.fillText(status.weights);
  }

  fillRows(captured) {
    const signature = JSON.stringify([captured?.step, captured?.sequences]);
    if (captured && captured.step >= 0 && signature !== this.rowsOf) {
      this.rowsOf = signature;
      replace(this.row, h("option", { value: "" }, "row"), captured.sequences.map(([id, end]) => h("option", { value: end - 1 }, `${plain(id)}, last row (${end - 1})`)));
    }
    if (this.view.status.weights) this.row.value = this.view.status.weights.row;
  }

  fillText(weights) {
    this.text.hidden = !weights;
    if (!weights) return;
    const signature = `${weights.layer} ${weights.step} ${weights.row} ${this.theme.name} ${this.head.value}`;
    if (signature === this.signature) return;
    if (this.head.options.length !== weights.num_heads + 1) {
      replace(this.head, h("option", { value: "" }, "mean of the heads"), Array.from({ length: weights.num_heads }, (_, i) => h("option", { value: i }, `head ${i}`)));
    }
    this.signature = signature;
    const { colours } = this.theme, values = this.values(weights), most = Math.max(...values, 1e-12);
    replace(this.text, weights.tokens.map((text, position) => {
      const fill = mix(colours.background, colours.text, Math.sqrt(Math.min(1, values[position] / most)) * 0.85);
      return h("span", { style: `background:${fill};color:${inkOn(fill)}`, title: `position ${position}: ${values[position].toFixed(4)}` }, text);
    }));
    setText(this.words, `${plain(weights.request)}, position ${formatNumber(weights.position)}: layer ${weights.layer} of step ${weights.step}, row ${weights.row}. The darkest token has weight ${most.toFixed(3)}.`);
  }

  /** Weight of each position for the chosen head, or the mean over the heads. */
  values(weights) {
    const bytes = Uint8Array.from(atob(weights.weights), (c) => c.charCodeAt(0)), n = weights.tokens.length;
    const of = (head, position) => (bytes[head * n + position] / 255) * weights.largest[head];
    const heads = this.head.value === "" ? weights.largest.map((_, i) => i) : [Number(this.head.value)];
    return Array.from({ length: n }, (_, position) => heads.reduce((sum, head) => sum + of(head, position), 0) / heads.length);
  }

  tableTwin() {
    const { weights } = this.view.status;
    if (!weights) return { headings: ["nothing captured"], rows: [] };
    return { caption: `Row ${weights.row} of ${plain(weights.request)}`, headings: ["position", "token", "weight"], rows: this.values(weights).map((value, i) => [i, plain(weights.tokens[i]), value.toFixed(4)]) };
  }
}

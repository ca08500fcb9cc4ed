// Attention weights of one row of a captured layer, over the text.

import { formatNumber, h, plain, replace, select, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { inkOn, mix } from "./theme.js";

export class WeightsPanel extends Panel {
  constructor(view) {
    super(view, {
      id: "weights",
      title: "Attention weights",
      hint: "a stronger colour means more attention (square-root scale)",
    });
    this.layer = h("input", { type: "number", min: 0, value: 0, class: "wb-number-input", "aria-label": "Layer" });
    const capture = () => view.send("capture", { layer: Number(this.layer.value) });
    this.capture = h("button", { class: "wb-button", onclick: capture }, "Capture the next step");
    this.row = select("Row", [], () => view.send("show_weights", { row: Number(this.row.value) }));
    this.head = select("Head", [], () => this.redraw());
    this.summary = h("p", { class: "wb-facts" });
    this.text = h("div", { class: "wb-weights wb-scroll", tabindex: 0 });
    const layer = h("label", {}, "layer ", this.layer);
    const forget = () => view.send("forget_capture");
    this.forget = h("button", { class: "wb-quiet", type: "button", hidden: true, onclick: forget }, "Close");
    const bar = h("div", { class: "wb-bar" }, layer, this.capture, this.row, this.head, this.forget);
    this.body.append(bar, this.summary, this.text);
  }

  redraw() {
    this.signature = "";
    super.redraw();
  }

  frame(settled = false) {
    this.element.hidden = !this.view.can("capture"); // what is hidden is not in sight, and would not render to appear
    super.frame(settled);
  }

  render() {
    const { capture, weights } = this.view.status;
    this.row.hidden = this.head.hidden = !capture || capture.step < 0;
    this.forget.hidden = !capture;
    if (!weights) setText(this.summary, this.whatNext(capture));
    this.fillRows(capture);
    this.fillText(weights);
  }

  whatNext(capture) {
    if (!capture) return "Choose a layer. The next step keeps the inputs of its attention.";
    const { layer, step } = capture;
    return step < 0
      ? `Layer ${layer} will be captured in the next step.`
      : `Layer ${layer} of step ${step} is captured. Choose a row.`;
  }

  fillRows(capture) {
    const signature = JSON.stringify([capture?.step, capture?.sequences]);
    if (capture && capture.step >= 0 && signature !== this.rowsOf) {
      this.rowsOf = signature;
      const option = ([id, end]) => h("option", { value: end - 1 }, `${plain(id)}, last row (${end - 1})`);
      replace(this.row, h("option", { value: "" }, "row"), capture.sequences.map(option));
    }
    if (this.view.status.weights) this.row.value = this.view.status.weights.row;
  }

  fillText(weights) {
    this.text.hidden = !weights;
    if (!weights) return;
    const { layer, step, row, num_heads: numHeads } = weights;
    const signature = `${layer} ${step} ${row} ${this.theme.name} ${this.head.value}`;
    if (signature === this.signature) return;
    this.signature = signature;
    if (this.head.options.length !== numHeads + 1) {
      const heads = Array.from({ length: numHeads }, (_, head) => h("option", { value: head }, `head ${head}`));
      replace(this.head, h("option", { value: "" }, "mean of all heads"), heads);
    }
    const values = this.values(weights), most = Math.max(...values, 1e-12);
    replace(this.text, weights.tokens.map((text, position) => this.token(text, position, values[position], most)));
    const query = `${plain(weights.request)}, position ${formatNumber(weights.position)}`;
    const largest = `The strongest token has weight ${most.toFixed(3)}.`;
    setText(this.summary, `${query}: layer ${layer} of step ${step}, row ${row}. ${largest}`);
  }

  token(text, position, value, most) {
    const { background, text: dark } = this.theme.colours;
    const fill = mix(background, dark, Math.sqrt(Math.min(1, value / most)) * 0.85);
    const title = `position ${position}: ${value.toFixed(4)}`;
    return h("span", { style: `background:${fill};color:${inkOn(fill)}`, title }, text);
  }

  /** Weight of each position for the chosen head, or the mean over the heads. */
  values({ weights, tokens, largest }) {
    const bytes = Uint8Array.from(atob(weights), (c) => c.charCodeAt(0)), n = tokens.length;
    const heads = this.head.value === "" ? largest.map((_, head) => head) : [Number(this.head.value)];
    return Array.from({ length: n }, (_, position) => {
      let sum = 0;
      for (const head of heads) sum += (bytes[head * n + position] / 255) * largest[head];
      return sum / heads.length;
    });
  }

  tableData() {
    const { weights } = this.view.status;
    if (!weights) return { headings: ["nothing captured"], rows: [] };
    return {
      caption: `Row ${weights.row} of ${plain(weights.request)}`,
      headings: ["position", "token", "weight"],
      rows: this.values(weights).map((value, i) => [i, plain(weights.tokens[i]), value.toFixed(4)]),
    };
  }
}

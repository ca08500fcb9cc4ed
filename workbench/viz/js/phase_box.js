// A step taken phase by phase: the phase it has reached, the results of that phase, and for a layer the inputs and the
// output of its attention.

import { candidateBars } from "./candidates.js";
import { formatNumber, h, plain, replace, setText } from "./dom.js";
import { SMALL, text } from "./drawing.js";
import { mix } from "./theme.js";

const BEFORE = ["schedule", "prepare"], AFTER = ["forward", "sample"];
const HEAD_HEIGHT = 7, AXIS = 14;

export class PhaseBox {
  constructor(view) {
    this.view = view;
    const button = (label, props) => h("button", { class: "wb-button", ...props }, label);
    this.next = button("Next phase", {
      class: "wb-button wb-primary",
      title: "Run the next phase (I)",
      onclick: () => view.stepInto(),
    });
    this.finishForward = button("Finish the forward pass", {
      title: "Run the remaining layers, and stop after the last one",
      onclick: () => view.send("step_into", { layers: false }),
    });
    const finish = button("Finish the step", { onclick: () => view.send("step") });
    this.title = h("strong", {});
    this.what = h("span", { class: "wb-hint" });
    this.track = h("ol", { class: "wb-track", "aria-label": "Phases of the step" });
    this.facts = h("dl", { class: "wb-keys wb-phase-facts" });
    this.pictures = h("div", { class: "wb-norms" });
    const bar = h("div", { class: "wb-bar" }, this.title, this.what, this.next, this.finishForward, finish);
    const props = { class: "wb-phase", hidden: true, "aria-label": "Step into" };
    this.candidates = h("div", { class: "wb-candidates" });
    this.below = h("p", { class: "wb-note" });
    this.drafts = h("ul", { class: "wb-drafts", "aria-label": "Drafts" });
    const parts = [bar, this.track, this.pictures, this.facts, this.drafts, this.candidates, this.below];
    this.element = h("section", props, parts);
  }

  update({ phase, capture }) {
    this.element.hidden = !phase;
    if (!phase) return;
    const { store, theme } = this.view;
    const signature = `${JSON.stringify(phase)} ${theme.name} ${this.element.clientWidth}`;
    if (signature === this.signature) return;
    this.signature = signature;
    const numLayers = store.facts.model?.num_layers || 0, inLayer = phase.layer !== undefined;
    setText(
      this.title,
      `Inside step ${phase.step}: ${inLayer && numLayers ? `layer ${phase.layer} of ${numLayers}` : phase.name}`,
    );
    const last = store.numSteps ? `step ${store.label(store.numSteps - 1)}` : "";
    setText(this.below, last ? `The panels below show steps that are complete, the last of them is ${last}.` : "");
    setText(this.what, phase.what);
    this.what.title = phase.what;
    this.finishForward.hidden = !inLayer && phase.name !== "prepare";
    this.fillTrack(phase.name, numLayers);
    // The numbers of a picture are in its caption.
    const norms = phase.norms || {}, written = phase.facts.filter(([name]) => !norms[name]);
    const fact = ([name, value]) => [h("dt", {}, h("bdi", {}, plain(name))), h("dd", {}, plain(value, 600))];
    replace(this.facts, written.map(fact));
    this.fillDrafts(phase.drafts || []);
    this.fillCandidates(phase.candidates || []);
    this.pictures.hidden = !phase.norms;
    const captions = new Map(phase.facts), sequences = capture?.sequences || [];
    const picture = ([name, values]) => this.picture(name, values, captions.get(name), sequences);
    replace(this.pictures, Object.entries(norms).map(picture));
  }

  /** The drafts that the step verifies, each with the model's probability and, if it was drawn, the proposer's. */
  fillDrafts(drafts) {
    this.drafts.hidden = !drafts.length;
    const percent = (share) => `${(share * 100).toFixed(1)}%`;
    const item = ({ request, id, text, probability, draft_probability: drawn, accepted }) => {
      const proposed = drawn === null ? "" : `, draft model ${percent(drawn)}`;
      const verdict = accepted === null ? "" : accepted ? ": accepted" : ": rejected";
      const props = { "data-accepted": accepted === null ? null : String(accepted), title: `token ${id}` };
      const word = h("bdi", {}, JSON.stringify(plain(text, 24)));
      const name = h("bdi", {}, plain(request));
      return h("li", props, name, " draft ", word, `: model ${percent(probability)}${proposed}${verdict}`);
    };
    replace(this.drafts, drafts.map(item));
  }

  /** The most likely tokens of each row that samples. */
  fillCandidates(rows) {
    this.candidates.hidden = !rows.length;
    const row = (top) => {
      return h("figure", {}, h("figcaption", {}, h("bdi", {}, plain(top.request))), candidateBars(top));
    };
    replace(this.candidates, rows.map(row));
  }

  /** All phases in order, the done ones filled. A layer is a small cell, because a model may have a hundred. */
  fillTrack(current, numLayers) {
    const layers = Array.from({ length: numLayers }, (_, i) => `layer ${i}`);
    const drafts = this.view.store.facts.config.num_speculative_tokens ? ["draft"] : [];
    const names = [...BEFORE, ...layers, ...AFTER, ...drafts, "record"], now = names.indexOf(current);
    const cell = (name, i) => {
      const isLayer = name.startsWith("layer ");
      const marks = { "data-done": i <= now ? "true" : null, "aria-current": i === now ? "step" : null };
      return h("li", { class: isLayer ? "wb-layer" : null, title: name, ...marks }, isLayer ? "" : name);
    };
    replace(this.track, names.map(cell));
  }

  /** Norms of every head (down) of every packed row (across): a stronger colour is larger. */
  picture(name, norms, facts, sequences) {
    const { heads, num_rows: numRows, least, most } = norms;
    const ratio = globalThis.devicePixelRatio || 1;
    const width = Math.max(120, Math.floor((this.element.clientWidth - 44) / 2)), height = heads * HEAD_HEIGHT + AXIS;
    const range = `from ${formatNumber(least)} to ${formatNumber(most)}`;
    const canvas = h("canvas", {
      role: "img",
      width: Math.round(width * ratio),
      height: Math.round(height * ratio),
      style: `width:${width}px;height:${height}px`,
      "aria-label": `${name}: norms of ${heads} heads in ${numRows} packed rows, ${range}`,
    });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.textBaseline = "middle";
    this.drawNorms(context, norms, width);
    this.drawSequences(context, sequences, numRows, width, height);
    return h("figure", {}, h("figcaption", {}, h("b", {}, name), ` ${norms.what} · ${facts}`), canvas);
  }

  drawNorms(context, { picture, columns, heads }, width) {
    const { colours } = this.view.theme, cell = width / columns, wide = Math.max(1, cell - (cell > 4 ? 1 : 0));
    const bytes = Uint8Array.from(atob(picture), (c) => c.charCodeAt(0));
    for (let head = 0; head < heads; head++) {
      for (let column = 0; column < columns; column++) {
        context.fillStyle = mix(colours.hairline, colours.text, bytes[head * columns + column] / 255);
        context.fillRect(column * cell, head * HEAD_HEIGHT, wide, HEAD_HEIGHT - 1);
      }
    }
  }

  /** The sequences under a picture, each at its first row, as far as their names fit. */
  drawSequences(context, sequences, numRows, width, height) {
    const { muted } = this.view.theme.colours;
    let labelled = -Infinity, from = 0;
    for (const [id, to] of sequences) {
      const x = (from / numRows) * width, label = plain(id, 10);
      context.fillStyle = muted;
      context.fillRect(x, 0, 1, height - AXIS + 3);
      if (x > labelled) {
        text(context, label, x + 2, height - 5, muted, SMALL);
        labelled = x + 14 + context.measureText(label).width;
      }
      from = to;
    }
  }
}

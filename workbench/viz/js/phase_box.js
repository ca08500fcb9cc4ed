// A step taken phase by phase: where it stands, what the phase made, and for a layer what its attention was handed.

import { h, plain, replace, setText } from "./dom.js";
import { SMALL, text } from "./drawing.js";
import { mix } from "./theme.js";

const BEFORE = ["schedule", "prepare"], AFTER = ["forward", "sample", "record"];
const HEAD_HEIGHT = 7, AXIS = 14;

export class PhaseBox {
  constructor(view) {
    this.view = view;
    this.next = h("button", { class: "wb-button wb-primary", title: "On to the next phase (I)", onclick: () => view.stepInto() }, "Next phase");
    this.finishForward = h("button", { class: "wb-button", title: "Run the layers that are left, and stop after the last", onclick: () => view.send("step_into", { layers: false }) }, "Finish the forward pass");
    this.title = h("strong", {});
    this.what = h("span", { class: "wb-hint" });
    this.track = h("ol", { class: "wb-track", "aria-label": "Phases of the step" });
    this.facts = h("dl", { class: "wb-keys wb-phase-facts" });
    this.pictures = h("div", { class: "wb-norms" });
    this.element = h("section", { class: "wb-phase", hidden: true, "aria-label": "Step into" }, h("div", { class: "wb-bar" }, this.title, this.what, this.next, this.finishForward,
      h("button", { class: "wb-button", onclick: () => view.send("step") }, "Finish the step")), this.track, this.pictures, this.facts);
  }

  update(status) {
    const phase = status.phase;
    this.element.hidden = !phase;
    if (!phase) return;
    const signature = `${JSON.stringify(phase)} ${this.view.theme.name} ${this.element.clientWidth}`;
    if (signature === this.signature) return;
    this.signature = signature;
    const layers = this.view.store.facts.model?.num_layers || 0, inLayer = phase.layer !== undefined;
    setText(this.title, `In the step: ${inLayer && layers ? `layer ${phase.layer} of ${layers}` : phase.name}`);
    setText(this.what, phase.what);
    this.what.title = phase.what;
    this.finishForward.hidden = !inLayer && phase.name !== "prepare";
    this.drawTrack(phase, layers);
    // What a picture shows has its numbers in its caption.
    replace(this.facts, phase.facts.filter(([name]) => !phase.norms?.[name]).map(([name, value]) => [h("dt", {}, h("bdi", {}, plain(name))), h("dd", {}, plain(value, 600))]));
    this.pictures.hidden = !phase.norms;
    replace(this.pictures, Object.entries(phase.norms || {}).map(([name, norms]) => this.picture(name, norms, new Map(phase.facts).get(name), status.capture?.sequences || [])));
  }

  /** Every phase in order, those that are done filled; a layer is a small cell, because a model may have a hundred. */
  drawTrack(phase, layers) {
    const names = [...BEFORE, ...Array.from({ length: layers }, (_, i) => `layer ${i}`), ...AFTER];
    const now = names.indexOf(phase.name);
    replace(this.track, names.map((name, i) => h("li", {
      class: name.startsWith("layer ") ? "wb-layer" : null, title: name, "data-done": i <= now ? "true" : null, "aria-current": i === now ? "step" : null,
    }, name.startsWith("layer ") ? "" : name)));
  }

  /** Norms of every head (down) of every packed row (across): darker is larger. */
  picture(name, norms, facts, sequences) {
    const { theme } = this.view, { colours } = theme, { columns, heads, num_rows: rows } = norms;
    const bytes = Uint8Array.from(atob(norms.picture), (c) => c.charCodeAt(0));
    const ratio = globalThis.devicePixelRatio || 1, width = Math.max(120, Math.floor((this.element.clientWidth - 44) / 2)), height = heads * HEAD_HEIGHT + AXIS;
    const canvas = h("canvas", { role: "img", width: Math.round(width * ratio), height: Math.round(height * ratio), style: `width:${width}px;height:${height}px`,
      "aria-label": `${name}: norm of ${heads} heads of ${rows} packed rows, ${norms.least.toPrecision(3)} to ${norms.most.toPrecision(3)}` });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.textBaseline = "middle";
    const cell = width / columns;
    for (let head = 0; head < heads; head++) {
      for (let column = 0; column < columns; column++) {
        context.fillStyle = mix(colours.hairline, colours.text, bytes[head * columns + column] / 255);
        context.fillRect(column * cell, head * HEAD_HEIGHT, Math.max(1, cell - (cell > 4 ? 1 : 0)), HEAD_HEIGHT - 1);
      }
    }
    let labelled = -Infinity, from = 0;
    for (const [id, to] of sequences) {
      const x = (from / rows) * width, label = plain(id, 10);
      context.fillStyle = colours.muted;
      context.fillRect(x, 0, 1, height - AXIS + 3);
      if (x > labelled) {
        text(context, label, x + 2, height - 5, colours.muted, { font: SMALL });
        labelled = x + 14 + context.measureText(label).width;
      }
      from = to;
    }
    return h("figure", {}, h("figcaption", {}, h("b", {}, name), ` ${norms.what} · ${facts}`), canvas);
  }
}

// (e) Metrics as small multiples on the shared step axis; every one says its unit and its value at the cursor.

import { formatNumber, formatSeconds } from "./dom.js";
import { CanvasPanel, SMALL, StepAxis, text } from "./panel.js";
import { drawCursor } from "./timeline.js";

const ROW = 46, TOP = 4;

/** What is plotted: a value per step (NaN for none), and how it is written. "dots" has one value per token. */
function definitions(store) {
  const value = (name) => (step) => store.value(name, step);
  const pool = Math.max(1, store.pool.size - 1), size = store.facts.block_size || 1;
  const per = (name) => (step) => (store.duration(step) > 0 ? store.value(name, step) / store.duration(step) : NaN);
  const share = (text_) => (v) => (Number.isFinite(v) ? `${(v * 100).toFixed(0)} % ${text_}` : "–");
  const time = (v) => (store.timed() ? formatSeconds(v) : `${formatNumber(v)} steps`);
  const owned = (step) => pool - store.value("free_blocks", step);
  const list = [
    { name: "time to first token", dots: "first", write: time },
    { name: "inter-token latency", dots: "next", write: time },
    { name: "token budget used", of: (step) => (store.value("decode_tokens", step) + store.value("prefill_tokens", step)) / Math.max(1, store.value("token_budget", step)), write: share("of the budget"), most: 1 },
    { name: "KV blocks in use", of: (step) => owned(step) / pool, second: (step) => (owned(step) + store.value("cached_blocks", step)) / pool, write: share("in use"), most: 1 },
    { name: "unused slots in blocks", of: (step) => (owned(step) ? store.value("unused_slots", step) / (owned(step) * size) : 0), write: share("of owned slots") },
    { name: "waiting requests", of: value("num_waiting"), write: (v) => `${formatNumber(v)} waiting` },
    { name: "recomputed tokens", of: value("recomputed_tokens"), write: (v) => `${formatNumber(v)} tokens` },
  ];
  if (store.timed()) {
    list.splice(2, 0, { name: "prefill throughput", of: per("prefill_tokens"), write: (v) => `${formatNumber(v)} tok/s` }, { name: "decode throughput", of: per("decode_tokens"), write: (v) => `${formatNumber(v)} tok/s` });
  }
  return list;
}

export class MetricsPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "metrics", title: "Metrics", hint: "on the same step axis; the number is the value at the cursor", height: 200 });
  }

  layout() {
    this.definitions = this.store.numSteps ? definitions(this.store) : [];
    this.setHeight(TOP + Math.max(1, this.definitions.length) * ROW + 4);
  }

  /** Value of a metric at a step; for dots the mean of the step's tokens. */
  at(metric, step) {
    if (metric.of) return metric.of(step);
    const values = this.latencies(metric, step);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
  }

  latencies(metric, step) {
    const { store } = this, first = store.facts.codes.first_token;
    const latency = store.columns.get("chunk.latency").data, flags = store.columns.get("chunk.flags").data, result = [];
    for (let c = store.bounds.chunk[step]; c < store.bounds.chunk[step + 1]; c++) {
      if (latency[c] === latency[c] && ((flags[c] & first) > 0) === (metric.dots === "first")) result.push(latency[c]);
    }
    return result;
  }

  draw(context, width) {
    const { theme, store } = this, colours = theme.colours;
    if (!store.numSteps) return text(context, "No steps yet.", 84, 16, colours.muted);
    const axis = new StepAxis(store, this.cursor, width);
    this.definitions.forEach((metric, row) => {
      const top = TOP + row * ROW + 6, base = top + ROW - 14;
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, base, axis.x1 - axis.x0, 1);
      const stride = Math.max(1, Math.floor((axis.last - axis.first) / Math.max(1, axis.x1 - axis.x0)));
      let most = metric.most || 0;
      const points = [];
      for (let step = axis.first; step < axis.last; step += stride) {
        if (metric.dots) {
          // Every value of every step of the bin, so that no slow token is lost.
          for (let s = step; s < Math.min(step + stride, axis.last); s++) for (const v of this.latencies(metric, s)) points.push([s, v]);
        } else {
          let peak = NaN;
          for (let s = step; s < Math.min(step + stride, axis.last); s++) { const v = metric.of(s); if (!(v <= peak)) peak = v; }
          points.push([step, peak, metric.second?.(step)]);
        }
      }
      for (const [, v, second] of points) most = Math.max(most, v || 0, second || 0);
      const y = (v) => base - (most ? v / most : 0) * (base - top);
      if (metric.second) this.area(context, axis, points.map(([s, , v]) => [s, v]), y, base, colours.cached, stride);
      if (metric.dots) this.dots(context, axis, points, y);
      else this.area(context, axis, points, y, base, colours.owned, stride);
      text(context, most ? metric.write(most).replace(/ (of|in|waiting).*/, "") : "0", axis.x0 - 8, top + 3, colours.muted, { align: "right", font: SMALL });
      text(context, metric.name, axis.x1 + 16, top + 7, colours.muted, { font: SMALL });
    });
  }

  area(context, axis, points, y, base, colour, stride) {
    context.fillStyle = colour;
    for (const [step, value] of points) {
      if (!(value >= 0)) continue;
      const x = axis.x(step), end = axis.end(Math.min(step + stride - 1, this.store.numSteps - 1));
      context.fillRect(x, y(value), Math.max(1, end - x - (end - x > 5 ? 1 : 0)), Math.max(value > 0 ? 1 : 0, base - y(value)));
    }
  }

  dots(context, axis, points, y) {
    context.fillStyle = this.theme.colours.prefill;
    const limit = Math.max(1, Math.ceil(points.length / 4000));
    for (let i = 0; i < points.length; i += limit) {
      const [step, value] = points[i];
      context.fillRect((axis.x(step) + axis.end(step)) / 2 - 1.25, y(value) - 1.25, 2.5, 2.5);
    }
  }

  showsOverlay() { return true; }

  drawOverlay(context, width, height) {
    if (!this.store.numSteps) return;
    drawCursor(context, this, height);
    const axis = new StepAxis(this.store, this.cursor, width);
    this.definitions.forEach((metric, row) => {
      const value = this.at(metric, this.cursor.step);
      text(context, Number.isFinite(value) ? metric.write(value) : "none in this step", axis.x1 + 16, TOP + row * ROW + 28, this.theme.colours.text);
    });
  }

  hit(x, y) {
    const step = new StepAxis(this.store, this.cursor, this.width).stepAt(x), metric = this.definitions?.[Math.floor((y - TOP) / ROW)];
    if (step < 0 || !metric) return null;
    const value = this.at(metric, step);
    return { step, hover: { step }, lines: [`step ${formatNumber(this.store.label(step))}`, `${metric.name}: ${Number.isFinite(value) ? metric.write(value) : "none in this step"}`] };
  }

  describe() {
    return (this.definitions || []).map((metric) => { const v = this.at(metric, this.cursor.step); return `${metric.name} ${Number.isFinite(v) ? metric.write(v) : "none"}`; }).join("; ");
  }

  tableTwin() {
    this.layout();
    const first = Math.max(0, Math.floor(this.cursor.range[0])), last = Math.min(this.store.numSteps, Math.ceil(this.cursor.range[1]), first + 500);
    return {
      caption: `Steps ${this.store.label(first)} to ${this.store.label(last - 1)}`, headings: ["step", ...this.definitions.map((metric) => metric.name)], onclick: (row) => this.cursor.seek(row.step),
      rows: Array.from({ length: Math.max(0, last - first) }, (_, i) => ({ step: first + i, cells: [this.store.label(first + i), ...this.definitions.map((metric) => { const v = this.at(metric, first + i); return Number.isFinite(v) ? metric.write(v) : "–"; })] })),
    };
  }
}

// Metrics as small multiples on the shared step axis; every one says its unit and its value at the cursor.

import { formatNumber, formatSeconds } from "./dom.js";
import { SMALL, text } from "./drawing.js";
import { MARGIN, StepAxis } from "./step_axis.js";
import { StepPanel } from "./step_panel.js";

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

export class MetricsPanel extends StepPanel {
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

  /** The largest value of each metric in the visible steps, kept while the axis begins at the same step. */
  scale(axis) {
    const { store, definitions } = this, stride = Math.max(1, Math.floor((axis.last - axis.first) / Math.max(1, axis.x1 - axis.x0)));
    let known = this.known;
    if (!known || known.first !== axis.first || known.upTo > axis.last || known.most.length !== definitions.length || known.of !== store.facts) {
      known = this.known = { of: store.facts, first: axis.first, upTo: axis.first, most: definitions.map((metric) => metric.most || 0) };
    }
    definitions.forEach((metric, i) => {
      let most = known.most[i];
      for (let step = known.upTo; step < axis.last; step++) {
        if (metric.dots) for (const value of this.latencies(metric, step)) most = Math.max(most, value);
        else most = Math.max(most, metric.of(step) || 0, metric.second?.(step) || 0);
      }
      known.most[i] = most;
    });
    known.upTo = Math.max(known.upTo, axis.last);
    return { most: known.most, stride };
  }

  draw(context, axis, from) {
    const { store } = this, colours = this.theme.colours;
    if (!store.numSteps) return text(context, "No steps yet.", 84, 16, colours.muted);
    const { most, stride } = this.scale(axis), first = axis.first + Math.floor((from - axis.first) / stride) * stride;
    this.definitions.forEach((metric, row) => {
      const top = TOP + row * ROW + 6, base = top + ROW - 14, high = most[row];
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, base, axis.x1 - axis.x0, 1);
      const y = (v) => base - (high ? v / high : 0) * (base - top);
      if (metric.dots) this.dots(context, axis, metric, first, y);
      else {
        if (metric.second) this.area(context, axis, metric.second, first, stride, y, base, colours.cached);
        this.area(context, axis, metric.of, first, stride, y, base, colours.owned);
      }
      text(context, high ? metric.write(high).replace(/ (of|in|waiting).*/, "") : "0", axis.x0 - 8, top + 3, colours.muted, { align: "right", font: SMALL });
      text(context, metric.name, axis.x1 + 16, top + 7, colours.muted, { font: SMALL });
    });
  }

  /** A bar per step, or for each bin of `stride` steps the highest of them. */
  area(context, axis, of, first, stride, y, base, colour) {
    context.fillStyle = colour;
    for (let step = first; step < axis.last; step += stride) {
      const last = Math.min(step + stride, axis.last) - 1;
      let value = NaN;
      for (let s = step; s <= last; s++) { const v = of(s); if (!(v <= value)) value = v; }
      if (!(value >= 0)) continue;
      const x = axis.x(step), end = axis.end(last);
      context.fillRect(x, y(value), Math.max(1, end - x - (end - x > 5 ? 1 : 0)), Math.max(value > 0 ? 1 : 0, base - y(value)));
    }
  }

  /** Every value of every step, so that no slow token is lost; those on the same pixel are drawn once. */
  dots(context, axis, metric, first, y) {
    const drawn = new Set();
    context.fillStyle = this.theme.colours.prefill;
    for (let step = first; step < axis.last; step++) {
      const x = Math.round((axis.x(step) + axis.end(step)) / 2);
      for (const value of this.latencies(metric, step)) {
        const at = Math.round(y(value)), key = x * 4096 + at;
        if (drawn.has(key)) continue;
        drawn.add(key);
        context.fillRect(x - 1.25, at - 1.25, 2.5, 2.5);
      }
    }
  }

  showsOverlay() { return this.store.numSteps > 0; }

  drawOverlay(context, width) {
    const x = width - MARGIN.right + 16;
    this.definitions.forEach((metric, row) => {
      const value = this.at(metric, this.cursor.step);
      text(context, Number.isFinite(value) ? metric.write(value) : "none in this step", x, TOP + row * ROW + 28, this.theme.colours.text);
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

// Metrics as small plots on the shared step axis; each shows its unit and its value at the cursor.

import { counted, formatNumber, formatSeconds, setText } from "./dom.js";
import { SMALL, text } from "./drawing.js";
import { hasRoomAtRight, marginOf } from "./step_axis.js";
import { StepPanel } from "./step_panel.js";

const ROW = 46, TOP = 4;

/** Height of a line for the name of a metric and its value, if the right side has no room for them. */
const LINE = 14;

/**
 * The metrics of a trace. Each has a `name`, a function `write(value)`, and either
 * - `of(step)`, its value in a step (NaN for none), with `second(step)` for an area behind it, which is at most `most`,
 *   the minimum of the top of its scale, or
 * - `dots`, one value per token: "first" for times to first token, "next" for inter-token latencies.
 */
function metricsOf(store) {
  const value = (name) => (step) => store.value(name, step);
  const pool = Math.max(1, store.pool.size - 1), size = store.facts.block_size || 1;
  const owned = (step) => pool - store.value("free_blocks", step);
  const rate = (of) => (step) => (store.duration(step) > 0 ? of(step) / store.duration(step) : NaN);
  const time = (v) => (store.timed() ? formatSeconds(v) : counted(v, "step"));
  const tokensPerSecond = (v) => `${formatNumber(v)} tok/s`;
  const share = (unit) => (v) => (Number.isFinite(v) ? `${(v * 100).toFixed(0)}% ${unit}` : "–");
  const throughput = [
    { name: "prefill throughput", of: rate(value("prefill_tokens")), write: tokensPerSecond },
    { name: "decode throughput", of: rate((step) => store.numDecoded(step)), write: tokensPerSecond },
  ];
  return [
    { name: "time to first token", dots: "first", write: time },
    { name: "inter-token latency", dots: "next", write: time },
    ...(store.timed() ? throughput : []),
    {
      name: "token budget used",
      of: (step) => store.numTokens(step) / Math.max(1, store.value("token_budget", step)),
      write: share("of the budget"),
      most: 1,
    },
    {
      name: "KV blocks in use",
      of: (step) => owned(step) / pool,
      second: (step) => (owned(step) + store.value("cached_blocks", step)) / pool,
      write: share("in use"),
      most: 1,
    },
    {
      name: "unused slots of used blocks",
      of: (step) => (owned(step) ? store.value("unused_slots", step) / (owned(step) * size) : 0),
      write: share("unused"),
    },
    { name: "waiting requests", of: value("num_waiting"), write: (v) => `${formatNumber(v)} waiting` },
    { name: "recomputed tokens", of: value("recomputed_tokens"), write: (v) => counted(v, "token") },
  ];
}

export class MetricsPanel extends StepPanel {
  constructor(view) {
    super(view, {
      id: "metrics",
      title: "Metrics",
      hint: "on the shared axis",
      height: 200,
    });
    this.metrics = [];
  }

  /** Height above each plot for its words; 0 where they are at its right. */
  get line() {
    return hasRoomAtRight(this.width) ? 0 : LINE;
  }

  /** Height of a metric. */
  get row() {
    return ROW + this.line;
  }

  layout() {
    this.metrics = this.store.numSteps ? metricsOf(this.store) : [];
    this.setHeight(TOP + Math.max(1, this.metrics.length) * this.row + 4);
    const axis = this.cursor.byTime ? "time" : "steps";
    const where = this.line ? "above each plot" : "at the right";
    const numbers = `${where}: the value at the cursor; at the left: the top of the scale`;
    setText(this.hintElement, `on the shared axis of ${axis}; ${numbers}`);
  }

  /** Value of a metric in a step; for dots the mean of the step's tokens. */
  at(metric, step) {
    if (metric.of) return metric.of(step);
    const values = this.latencies(metric, step);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
  }

  /** Value of a metric in a step as text, `none` when there is no value. */
  written(metric, step, none) {
    const value = this.at(metric, step);
    if (Number.isFinite(value)) return metric.write(value);
    return metric.dots === "next" && this.lacksGap(step) ? "unknown: the token before is not here" : none;
  }

  latencies(metric, step) {
    const { store } = this, result = [];
    const latency = store.column("chunk.latency"), [from, to] = store.span("chunk", step);
    for (let c = from; c < to; c++) {
      if (!Number.isNaN(latency[c]) && this.isFirst(c) === (metric.dots === "first")) result.push(latency[c]);
    }
    return result;
  }

  isFirst(c) {
    return (this.store.column("chunk.flags")[c] & this.store.facts.codes.first_token) > 0;
  }

  /** Whether a step gave a token after one that is not known. */
  lacksGap(step) {
    const { store } = this, sampled = store.column("chunk.sampled"), latency = store.column("chunk.latency");
    const [from, to] = store.span("chunk", step);
    for (let c = from; c < to; c++) if (sampled[c] >= 0 && Number.isNaN(latency[c]) && !this.isFirst(c)) return true;
    return false;
  }

  /** Steps per bar: with more visible steps than pixels, a bar stands for several. */
  stride(axis) {
    return Math.max(1, Math.floor((axis.last - axis.first) / Math.max(1, axis.x1 - axis.x0)));
  }

  /** The largest value of each metric in the visible steps, kept while the axis begins with the same step. */
  scale(axis) {
    const { store, metrics } = this;
    let known = this.known;
    const same = known?.first === axis.first && known.facts === store.facts && known.most.length === metrics.length;
    if (!same || known.upTo > axis.last) {
      const most = metrics.map((metric) => metric.most || 0);
      known = this.known = { facts: store.facts, first: axis.first, upTo: axis.first, most };
    }
    metrics.forEach((metric, i) => {
      for (let step = known.upTo; step < axis.last; step++) {
        const values = metric.dots ? this.latencies(metric, step) : [metric.of(step)];
        for (const value of values) known.most[i] = Math.max(known.most[i], value || 0);
      }
    });
    known.upTo = Math.max(known.upTo, axis.last);
    return { most: known.most, stride: this.stride(axis) };
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(context, axis, from) {
    const { colours } = this.theme;
    if (!this.store.numSteps) return text(context, "No steps yet.", 84, 16, colours.muted);
    const { most, stride } = this.scale(axis), first = axis.first + Math.floor((from - axis.first) / stride) * stride;
    this.metrics.forEach((metric, row) => {
      const begin = TOP + row * this.row, top = begin + this.line + 6, base = top + ROW - 14, high = most[row];
      const y = (value) => base - (high ? value / high : 0) * (base - top);
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, base, axis.x1 - axis.x0, 1);
      axis.clipped(context, this.height, () => {
        if (metric.second) this.drawBars(context, axis, metric.second, first, y, colours.cached);
        if (metric.dots) this.drawDots(context, axis, metric, first, y);
        else this.drawBars(context, axis, metric.of, first, y, colours.owned);
      });
      // The top of the scale is a number without its words.
      const label = high ? metric.write(high).replace(/ (of|in|waiting|unused).*/, "") : "0";
      text(context, label, axis.x0 - 8, top + 3, colours.muted, SMALL, "right");
      if (hasRoomAtRight(this.width)) text(context, metric.name, axis.x1 + 16, top + 7, colours.muted, SMALL);
      else text(context, metric.name, axis.x0, begin + 10, colours.muted, SMALL);
    });
  }

  /** A bar per step, or for each bin of `stride` steps a bar as high as the highest of them. */
  drawBars(context, axis, of, first, y, colour) {
    const stride = this.stride(axis), base = y(0);
    context.fillStyle = colour;
    for (let step = first; step < axis.last; step += stride) {
      const last = Math.min(step + stride, axis.last) - 1;
      let value = NaN;
      for (let s = step; s <= last; s++) {
        const v = of(s);
        if (!(v <= value)) value = v;
      }
      if (!(value >= 0)) continue;
      const x = axis.x(step), width = axis.end(last) - x, height = base - y(value);
      context.fillRect(x, y(value), Math.max(1, width - (width > 5 ? 1 : 0)), Math.max(value > 0 ? 1 : 0, height));
    }
  }

  /** Every value of every step, so that no slow token is lost; those on the same pixel are drawn once. */
  drawDots(context, axis, metric, first, y) {
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

  showsOverlay() {
    return this.store.numSteps > 0;
  }

  /** The words at the cursor are at the right of the axis, or where that has no room, above it. */
  overlayLeft() {
    return hasRoomAtRight(this.width) ? super.overlayLeft() : 0;
  }

  drawOverlay(context, width) {
    const right = width - marginOf(width).right, colour = this.theme.colours.text;
    this.metrics.forEach((metric, row) => {
      const begin = TOP + row * this.row, none = this.line ? "none" : "none in this step";
      const value = this.written(metric, this.cursor.step, none);
      if (hasRoomAtRight(width)) text(context, value, right + 16, begin + 28, colour);
      else text(context, value, right, begin + 10, colour, SMALL, "right");
    });
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x, y) {
    const step = this.axis().stepAt(x), metric = this.metrics[Math.floor((y - TOP) / this.row)];
    if (step < 0 || !metric) return null;
    const value = `${metric.name}: ${this.written(metric, step, "none in this step")}`;
    return { step, hover: { step }, lines: [`step ${formatNumber(this.store.label(step))}`, value] };
  }

  describe() {
    const { step } = this.cursor;
    return this.metrics.map((metric) => `${metric.name} ${this.written(metric, step, "none")}`).join("; ");
  }

  tableData() {
    this.layout();
    const headings = this.metrics.map((metric) => metric.name);
    return this.stepTable(headings, (step) => this.metrics.map((metric) => this.written(metric, step, "–")));
  }
}

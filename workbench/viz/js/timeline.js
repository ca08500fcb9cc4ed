// Step timeline: tokens of every step against the budget, decodes below, prefill above.

import { formatNumber, formatSeconds, plain } from "./dom.js";
import { SMALL, dashes, eventMark, hatch, text, ticks } from "./drawing.js";
import { StepAxis } from "./step_axis.js";
import { StepPanel } from "./step_panel.js";

const TOP = 18, STRIP = 22, BOTTOM = 16;
export const BIN_ABOVE_STEPS = 2000;

export class TimelinePanel extends StepPanel {
  constructor(view) {
    super(view, { id: "timeline", title: "Step timeline", hint: "tokens per step against the token budget", height: 150 });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const axis = new StepAxis(this.store, this.cursor, this.width);
      if (event.ctrlKey) this.cursor.zoom(event.deltaY > 0 ? 1.25 : 0.8, axis.from + (event.offsetX - axis.x0) / axis.stepWidth);
      else this.cursor.pan(((event.deltaX || event.deltaY) / 100) * (axis.to - axis.from) * 0.1);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.dragging = true;
    });
    this.canvas.addEventListener("pointerup", () => { this.dragging = false; });
    this.canvas.addEventListener("pointermove", (event) => {
      const step = this.dragging ? new StepAxis(this.store, this.cursor, this.width).stepAt(event.offsetX) : -1;
      if (step >= 0 && step !== this.cursor.step) this.cursor.seek(step);
    });
  }

  /** What the vertical scales are made for: the most tokens, budget and decodes of a visible step. */
  scale(axis) {
    const { store } = this;
    const result = { tokens: 1, budget: 0, decodes: 1 };
    for (let step = axis.first; step < axis.last; step++) {
      result.tokens = Math.max(result.tokens, this.tokens(step));
      result.budget = Math.max(result.budget, store.value("token_budget", step));
      result.decodes = Math.max(result.decodes, store.value("decode_tokens", step));
    }
    return result;
  }

  tokens(step) {
    return this.store.value("decode_tokens", step) + this.store.value("prefill_tokens", step);
  }

  draw(context, axis, from) {
    const { height } = this, colours = this.theme.colours;
    const base = height - BOTTOM - STRIP, scale = this.scale(axis), top = Math.max(scale.tokens, scale.budget);
    const y = (tokens) => base - (tokens / top) * (base - TOP);
    for (const tick of ticks(0, top, 3, true)) {
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, Math.round(y(tick)), axis.x1 - axis.x0, 1);
      text(context, formatNumber(tick), axis.x0 - 8, y(tick), colours.muted, { align: "right", font: SMALL });
    }
    text(context, "decodes", axis.x0 - 8, base + STRIP / 2 + 3, colours.muted, { align: "right", font: SMALL });
    const binned = axis.last - axis.first > BIN_ABOVE_STEPS;
    if (binned) this.drawBins(context, axis, y, base, from);
    else this.drawBars(context, axis, y, base, from, scale);
    this.drawBudget(context, axis, y, axis.x(from));
    this.drawSteps(context, axis, height);
    this.drawLegend(context, axis, binned);
  }

  drawBars(context, axis, y, base, from, { budget, decodes: most }) {
    const { store, theme } = this, colours = theme.colours, focused = theme.focus.size > 0;
    if (axis.last <= axis.first) return;
    const { focus } = theme;
    const request = store.columns.get("chunk.request")?.data, count = store.columns.get("chunk.num_tokens")?.data, flags = store.columns.get("chunk.flags")?.data;
    // The unused budget is what the opaque bars leave of one hatched area.
    hatch(context, axis.x(from), y(budget), axis.end(axis.last - 1) - axis.x(from), base - y(budget), colours.hairline);
    for (let step = from; step < axis.last; step++) {
      const x = axis.x(step), gap = axis.stepWidth > 4 || axis.byTime ? 1 : 0, w = Math.max(1, axis.end(step) - x - gap);
      const decode = store.value("decode_tokens", step), prefill = store.value("prefill_tokens", step);
      context.fillStyle = colours.decode;
      context.fillRect(x, y(decode), w, base - y(decode));
      context.fillStyle = colours.prefill;
      context.fillRect(x, y(decode + prefill), w, y(decode) - y(decode + prefill));
      if (focused) {
        let low = 0, high = decode;
        for (let c = store.bounds.chunk[step]; c < store.bounds.chunk[step + 1]; c++) {
          const isDecode = (flags[c] & 3) === 0, at = isDecode ? low : high;
          if (isDecode) low += count[c]; else high += count[c];
          if (!focus.has(request[c])) continue;
          context.fillStyle = isDecode ? theme.decode(request[c]) : theme.prefill(request[c]);
          context.fillRect(x, y(at + count[c]), w, y(at) - y(at + count[c]));
        }
      }
      if (decode) {
        // A few decodes against a large budget are thinner than a pixel: the strip shows their number.
        const r = Math.max(0.8, Math.min(w / 2, 3)), cy = base + STRIP - 2 - (decode / most) * (STRIP - 8);
        context.fillStyle = colours.prefill;
        if (r < 2) context.fillRect(x + w / 2 - r, cy - r, 2 * r, 2 * r);
        else {
          context.beginPath();
          context.arc(x + w / 2, cy, r, 0, 7);
          context.fill();
        }
      }
      this.drawMarks(context, step, x + w / 2);
    }
  }

  drawMarks(context, step, x) {
    const codes = this.store.facts.codes.events, kinds = this.store.columns.get("event.kind").data;
    if (this.store.bounds.event[step] === this.store.bounds.event[step + 1]) return;
    const seen = new Set();
    for (let e = this.store.bounds.event[step]; e < this.store.bounds.event[step + 1]; e++) seen.add(codes[kinds[e]]);
    for (const kind of ["finish", "admit", "resume", "preempt"]) {
      if (!seen.has(kind)) continue;
      const row = kind === "finish" ? 13 : kind === "preempt" ? 5 : 9;
      eventMark(context, this.theme, kind, x, row, 3);
    }
  }

  /** Above 2,000 visible steps: the range and the mean of each pixel column, never bars thinner than a pixel. */
  drawBins(context, axis, y, base, first) {
    const { store } = this, colours = this.theme.colours;
    const columns = Math.floor(axis.x1 - axis.x0);
    const decode = store.columns.get("decode_tokens").data, prefill = store.columns.get("prefill_tokens").data;
    for (let i = Math.max(0, Math.floor(axis.x(first) - axis.x0)); i < columns; i++) {
      const from = Math.floor(axis.from + (i * (axis.to - axis.from)) / columns), to = Math.min(store.numSteps, Math.max(from + 1, Math.floor(axis.from + ((i + 1) * (axis.to - axis.from)) / columns)));
      if (from >= to) continue;
      let low = Infinity, high = 0, sum = 0, decodes = 0;
      for (let step = from; step < to; step++) {
        const total = decode[step] + prefill[step];
        low = Math.min(low, total);
        high = Math.max(high, total);
        sum += total;
        decodes += decode[step];
      }
      const x = axis.x0 + i, mean = sum / (to - from), meanDecode = decodes / (to - from);
      context.fillStyle = colours.kv;
      context.fillRect(x, y(high), 1, Math.max(1, y(low) - y(high)));
      context.fillStyle = colours.prefill;
      context.fillRect(x, y(mean) - 0.75, 1, 1.5);
      context.fillStyle = colours.decode;
      context.fillRect(x, y(meanDecode), 1, base - y(meanDecode));
    }
  }

  drawBudget(context, axis, y, from) {
    const { store } = this, colours = this.theme.colours;
    if (!store.numSteps) return;
    const budget = store.value("token_budget", Math.min(axis.last, store.numSteps) - 1);
    if (budget) dashes(context, from, Math.round(y(budget)), axis.x1 - from, colours.text, 5, 3);
    const seats = store.facts.config.max_num_seqs;
    if (seats && seats < budget) dashes(context, from, Math.round(y(seats)), axis.x1 - from, colours.muted, 1, 3);
  }

  drawSteps(context, axis, height) {
    const colours = this.theme.colours;
    const values = axis.byTime ? ticks(axis.t0, axis.t1, 8) : ticks(axis.from, axis.to, 10, true);
    for (const value of values) {
      const x = axis.byTime ? axis.x0 + ((value - axis.t0) / (axis.t1 - axis.t0)) * (axis.x1 - axis.x0) : axis.x(value);
      if (x > axis.x1) continue;
      text(context, axis.byTime ? formatSeconds(value) : formatNumber(this.store.label(value)), x, height - 6, colours.muted, { font: SMALL });
      context.fillStyle = colours.hairline;
      context.fillRect(x, height - BOTTOM, 1, 4);
    }
    text(context, axis.byTime ? "time" : "step", axis.x0 - 8, height - 6, colours.muted, { align: "right", font: SMALL });
  }

  drawLegend(context, axis, binned) {
    const { theme } = this, colours = theme.colours;
    const x = axis.x1 + 16;
    const entries = [
      ["prefill tokens", () => { context.fillStyle = colours.prefill; context.fillRect(x, -4, 12, 8); }],
      ["decode tokens", () => { context.fillStyle = colours.decode; context.fillRect(x, -4, 12, 8); }],
      ["unused budget", () => { context.strokeStyle = colours.hairline; context.strokeRect(x + 0.5, -3.5, 11, 7); hatch(context, x, -4, 12, 8, colours.decode, 4); }],
      ["token budget", () => { context.setLineDash([4, 2]); context.strokeStyle = colours.text; context.beginPath(); context.moveTo(x, 0.5); context.lineTo(x + 12, 0.5); context.stroke(); context.setLineDash([]); }],
      ["max_num_seqs", () => { context.setLineDash([1, 3]); context.strokeStyle = colours.muted; context.beginPath(); context.moveTo(x, 0.5); context.lineTo(x + 12, 0.5); context.stroke(); context.setLineDash([]); }],
    ];
    if (binned) entries.splice(0, 3, ["min to max, and mean", () => { context.fillStyle = colours.kv; context.fillRect(x, -4, 12, 8); context.fillStyle = colours.prefill; context.fillRect(x, -0.75, 12, 1.5); }],
      ["mean decode tokens", () => { context.fillStyle = colours.decode; context.fillRect(x, -4, 12, 8); }]);
    entries.forEach(([label, mark], i) => {
      context.save();
      context.translate(0, TOP + 4 + i * 15);
      mark();
      context.restore();
      text(context, label, x + 18, TOP + 4 + i * 15, colours.muted, { font: SMALL });
    });
    ["admit", "preempt", "finish"].forEach((kind, i) => {
      const at = x + 5 + [0, 46, 104][i], row = TOP + 6 + entries.length * 15;
      eventMark(context, theme, kind, at, row, 3);
      text(context, kind, at + 8, row, colours.muted, { font: SMALL });
    });
  }

  showsOverlay() { return false; }

  cursorBottom() { return this.height - BOTTOM + 2; }

  hit(x) {
    const step = new StepAxis(this.store, this.cursor, this.width).stepAt(x);
    if (step < 0) return null;
    return { step, hover: { step }, lines: this.summary(step) };
  }

  summary(step) {
    const { store } = this, budget = store.value("token_budget", step), total = this.tokens(step);
    const lines = [`step ${formatNumber(store.label(step))}`,
      `${formatNumber(store.value("prefill_tokens", step))} prefill + ${formatNumber(store.value("decode_tokens", step))} decode = ${formatNumber(total)} of ${formatNumber(budget)} tokens`];
    const recomputed = store.value("recomputed_tokens", step);
    if (recomputed) lines.push(`${formatNumber(recomputed)} recomputed after a preemption`);
    if (store.timed()) lines.push(`${formatSeconds(store.duration(step))}, forward ${formatSeconds(store.value("seconds_forward", step))}`);
    lines.push(`${store.value("num_running", step)} running, ${store.value("num_waiting", step)} waiting, ${formatNumber(store.value("free_blocks", step))} free blocks`);
    for (const event of store.events(step).slice(0, 6)) lines.push(`${event.kind} ${plain(event.request.id)}${event.reason ? `: ${plain(event.reason, 80)}` : ""}`);
    return lines;
  }

  describe() {
    return this.store.numSteps ? `${this.store.numSteps} steps; ${this.summary(this.cursor.step).slice(0, 2).join(", ")}` : "no steps yet";
  }

  tableTwin() {
    const { store } = this, rows = [];
    const first = Math.max(0, Math.floor(this.cursor.range[0])), last = Math.min(store.numSteps, Math.ceil(this.cursor.range[1]), first + 500);
    for (let step = first; step < last; step++) {
      rows.push({ step, cells: [store.label(step), store.value("prefill_tokens", step), store.value("decode_tokens", step), store.value("token_budget", step), store.value("num_running", step), store.value("num_waiting", step), store.value("free_blocks", step), store.timed() ? formatSeconds(store.duration(step)) : "–"] });
    }
    return { caption: `Steps ${store.label(first)} to ${store.label(last - 1)}`, headings: ["step", "prefill", "decode", "budget", "running", "waiting", "free blocks", "duration"], rows, onclick: (row) => this.cursor.seek(row.step) };
  }
}

// Step timeline: the tokens of every step against the token budget, decodes below and prefill above.

import { counted, formatNumber, formatSeconds, plain, setText } from "./dom.js";
import { dashes, dot, eventMark, hatch, SMALL, text, tickLabel, ticks } from "./drawing.js";
import { box, dashed, frame, hatched, layers, legendEntry, LegendLines } from "./legend.js";
import { nameOf } from "./request.js";
import { hasRoomAtRight } from "./step_axis.js";
import { REACH, StepPanel } from "./step_panel.js";
import { numbersOf } from "./words.js";

const TOP = 18, STRIP = 22, BOTTOM = 16;
const HINT = "tokens per step against the token budget";
const BIN_ABOVE_STEPS = 2000;

/** Height of the marks of events, in the order in which they are drawn. */
const EVENT_Y = { finish: 13, admit: 9, resume: 9, preempt: 5, abort: 5 };

/** Pixels: outlines of narrower bars are joined. */
const NARROW = 12;

/** Pixels between two outlines from which on they are not joined: nothing ran. */
const GAP = 2;

/** Pixels: a narrower panel has its notes on the axis in short, and whole in their title. */
const WORDY = 900;

/** Share of the visible time from which on the wait before it is stated. */
const WORTH_SAYING = 0.01;

export class TimelinePanel extends StepPanel {
  constructor(view) {
    super(view, {
      id: "timeline",
      title: "Step timeline",
      hint: HINT,
      height: 150,
    });
    this.legend = new LegendLines();
    this.holder.before(this.legend.element);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.dragging = true;
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, () => {
        this.dragging = false;
      });
    }
    this.canvas.addEventListener("pointermove", (event) => {
      const step = this.dragging ? this.axis().stepAt(event.offsetX) : -1;
      if (step >= 0 && step !== this.cursor.step) this.cursor.seek(step);
    });
  }

  /** The run that is outlined over this one. */
  get other() {
    return this.cursor.beside;
  }

  /** The same if it can be drawn on this axis: one of times has no place for a run without any. */
  outlined(axis) {
    return this.other && (!axis.byTime || this.other.timed()) ? this.other : null;
  }

  /** Zoom around the pointer with Ctrl, pan with Shift. */
  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const axis = this.axis();
    const pointed = axis.from + (event.offsetX - axis.x0) / axis.stepWidth;
    if (event.ctrlKey) this.cursor.zoom(event.deltaY > 0 ? 1.25 : 0.8, pointed);
    else this.cursor.pan(((event.deltaX || event.deltaY) / 100) * (axis.to - axis.from) * 0.1);
  }

  /** The vertical scales: the maximum of tokens, budget and decodes over the visible steps. */
  scale(axis) {
    const { store } = this, result = { tokens: 1, budget: 0, decodes: 1 };
    for (let step = axis.first; step < axis.last; step++) {
      result.tokens = Math.max(result.tokens, store.numTokens(step));
      result.budget = Math.max(result.budget, store.value("token_budget", step));
      result.decodes = Math.max(result.decodes, store.value("decode_tokens", step));
    }
    const { other } = this;
    for (let step = 0; step < (other?.numSteps ?? 0); step++) {
      result.tokens = Math.max(result.tokens, other.numTokens(step));
    }
    return { ...result, ghosts: this.view.otherCount, pauses: axis.shared?.pauses.length };
  }

  layout() {
    const hints = this.cursor.byTime ? this.timeHints() : [];
    setText(this.hintElement, [HINT, ...hints.map(([short, long]) => this.width < WORDY ? short : long)].join("; "));
    this.hintElement.title = hints.map(([, long]) => long).join("; ");
  }

  /** The idle time that the axis leaves out, and the reason why it may begin after 0: each in short, and all of it. */
  timeHints() {
    const axis = this.axis(), idle = axis.stretches.leftOut, { before } = this.store.clock, hints = [];
    const left = `without ${formatSeconds(idle)} idle${axis.shared ? " in both runs" : ""}`;
    if (idle) hints.push([left, `time, ${left}`]);
    if (!axis.first && before > WORTH_SAYING * (axis.t1 - axis.t0)) {
      hints.push([
        `step 0 at ${formatSeconds(before)}`,
        `step 0 began ${formatSeconds(before)} after the first arrival, which is 0`,
      ]);
    }
    return hints;
  }

  draw(context, axis, from) {
    const { height } = this, { colours } = this.theme;
    const base = height - BOTTOM - STRIP, scale = this.scale(axis), top = Math.max(scale.tokens, scale.budget);
    const y = (tokens) => base - (tokens / top) * (base - TOP);
    for (const tick of ticks(0, top, 3, true)) {
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, Math.round(y(tick)), axis.x1 - axis.x0, 1);
      text(context, formatNumber(tick), axis.x0 - 8, y(tick), colours.muted, SMALL, "right");
    }
    text(context, "decodes", axis.x0 - 8, base + STRIP / 2 + 3, colours.muted, SMALL, "right");
    const binned = axis.last - axis.first > BIN_ABOVE_STEPS;
    axis.clipped(context, height, () => {
      if (binned) this.drawBins(context, axis, y, base, from);
      else this.drawBars(context, axis, y, base, from, scale);
      this.drawGhosts(context, axis, y, base);
      this.drawBudget(context, axis, y, axis.x(from));
      this.drawStalls(context, axis, base);
    });
    if (!binned) this.drawMarks(context, axis, from);
    this.drawStepLabels(context, axis, height);
    this.drawLegend(context, axis, binned, height);
  }

  // -- a bar per step --------------------------------------------------------------------------------------------

  drawBars(context, axis, y, base, from, { budget, decodes: mostDecodes }) {
    if (axis.last <= axis.first) return;
    const { store, theme } = this, { colours } = theme;
    // The unused budget is the part of one hatched area that the opaque bars leave visible.
    hatch(context, axis.x(from), y(budget), axis.end(axis.last - 1) - axis.x(from), base - y(budget), colours.hairline);
    for (let step = from; step < axis.last; step++) {
      const x = axis.x(step), gap = axis.stepWidth > 4 || axis.byTime ? 1 : 0;
      const width = Math.max(1, axis.end(step) - x - gap);
      const bar = (first, last, colour) => {
        context.fillStyle = colour;
        context.fillRect(x, y(last), width, y(first) - y(last));
      };
      const decodes = store.value("decode_tokens", step);
      bar(0, decodes, colours.decode);
      bar(decodes, store.numTokens(step), colours.prefill);
      if (theme.focus.size) this.drawFocused(step, decodes, bar);
      if (decodes) this.drawDecodes(context, x + width / 2, width, base, decodes / mostDecodes);
    }
  }

  /** The parts of a step's bar that belong to requests in focus. */
  drawFocused(step, decodes, bar) {
    const { store, theme } = this, [from, to] = store.span("chunk", step);
    const requests = store.column("chunk.request"), counts = store.column("chunk.num_tokens");
    const flags = store.column("chunk.flags");
    let low = 0, high = decodes;
    for (let c = from; c < to; c++) {
      const isDecode = (flags[c] & 3) === 0, at = isDecode ? low : high;
      if (isDecode) low += counts[c];
      else high += counts[c];
      if (!theme.focus.has(requests[c])) continue;
      bar(at, at + counts[c], isDecode ? theme.decode(requests[c]) : theme.prefill(requests[c]));
    }
  }

  /** The number of decodes in the strip: against a large budget, a few decodes are thinner than a pixel. */
  drawDecodes(context, x, width, base, share) {
    const radius = Math.max(0.8, Math.min(width / 2, 3)), y = base + STRIP - 2 - share * (STRIP - 8);
    context.fillStyle = this.theme.colours.prefill;
    if (radius < 2) context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    else dot(context, x, y, radius);
  }

  /** The events of each step, above its middle; no edge of the axis cuts a mark. */
  drawMarks(context, axis, from) {
    for (let step = from; step < axis.last; step++) {
      const x = axis.x(step), gap = axis.stepWidth > 4 || axis.byTime ? 1 : 0;
      const middle = x + Math.max(1, axis.end(step) - x - gap) / 2;
      if (middle >= axis.x0 && middle <= axis.x1 + 1) this.drawEvents(context, step, Math.max(middle, axis.x0 + 1));
    }
  }

  drawEvents(context, step, x) {
    const { store } = this, codes = store.facts.codes.events, kinds = store.column("event.kind");
    const [from, to] = store.span("event", step), seen = new Set();
    for (let e = from; e < to; e++) seen.add(codes[kinds[e]]);
    for (const kind in EVENT_Y) {
      if (seen.has(kind)) eventMark(context, this.theme, kind, x, EVENT_Y[kind], 3);
    }
  }

  // -- a column of pixels for several steps ----------------------------------------------------------------------

  /** Above BIN_ABOVE_STEPS visible steps: the range and the mean of each pixel column, instead of bars. */
  drawBins(context, axis, y, base, first) {
    const { store } = this, { colours } = this.theme;
    const columns = Math.floor(axis.x1 - axis.x0);
    const stepAt = (column) => Math.floor(axis.from + (column * (axis.to - axis.from)) / columns);
    for (let i = Math.max(0, Math.floor(axis.x(first) - axis.x0)); i < columns; i++) {
      const from = stepAt(i), to = Math.min(store.numSteps, Math.max(from + 1, stepAt(i + 1)));
      if (from >= to) continue;
      const x = axis.x0 + i, { least, most, mean, meanDecodes } = this.binOf(from, to);
      context.fillStyle = colours.kv;
      context.fillRect(x, y(most), 1, Math.max(1, y(least) - y(most)));
      context.fillStyle = colours.prefill;
      context.fillRect(x, y(mean) - 0.75, 1, 1.5);
      context.fillStyle = colours.decode;
      context.fillRect(x, y(meanDecodes), 1, base - y(meanDecodes));
    }
  }

  binOf(from, to) {
    const decode = this.store.column("decode_tokens"), prefill = this.store.column("prefill_tokens");
    let least = Infinity, most = 0, sum = 0, decodes = 0;
    for (let step = from; step < to; step++) {
      const total = decode[step] + prefill[step];
      least = Math.min(least, total);
      most = Math.max(most, total);
      sum += total;
      decodes += decode[step];
    }
    return { least, most, mean: sum / (to - from), meanDecodes: decodes / (to - from) };
  }

  /** The bars of the run beside this one, as outlines; narrow ones share one, so that it hides no bar. */
  drawGhosts(context, axis, y, base) {
    const other = this.outlined(axis);
    if (!other) return;
    context.strokeStyle = this.theme.colours.cursor;
    context.lineWidth = 1;
    context.beginPath();
    let begun = false, before = -Infinity; // the right end of the outline
    const times = axis.byTime ? axis.timesOf(other) : null;
    for (let step = 0; step < other.numSteps; step++) {
      const [start, end] = times ? [times.starts[step], times.ends[step]] : [step, step + 1];
      const x = axis.byTime ? axis.xOfTime(start) : axis.x(start),
        right = axis.byTime ? axis.xOfTime(end) : axis.x(end);
      if (right < axis.x0 || x > axis.x1) continue;
      const top = Math.round(y(other.numTokens(step))) + 0.5;
      const joined = right - x < NARROW, parted = begun && x - before >= GAP;
      if (parted) context.lineTo(before, base);
      if (!joined || !begun || parted) context.moveTo(x, base);
      context.lineTo(x, top);
      context.lineTo(right, top);
      if (!joined) context.lineTo(right, base);
      begun = joined;
      before = right;
    }
    context.stroke();
  }

  /** A line through each step that stalled. */
  drawStalls(context, axis, base) {
    context.fillStyle = this.theme.event("stall").colour;
    for (const { step } of this.view.stalls) {
      if (step >= axis.first && step < axis.last) context.fillRect(axis.x(step) - 1, 0, 2, base);
    }
  }

  // -- around the bars -------------------------------------------------------------------------------------------

  drawBudget(context, axis, y, from) {
    const { store } = this, { colours } = this.theme;
    if (!store.numSteps) return;
    const budget = store.value("token_budget", Math.min(axis.last, store.numSteps) - 1);
    if (budget) dashes(context, from, Math.round(y(budget)), axis.x1 - from, colours.text, 5, 3);
    const maxNumSeqs = store.facts.config.max_num_seqs;
    if (!maxNumSeqs || maxNumSeqs >= budget) return;
    dashes(context, from, Math.round(y(maxNumSeqs)), axis.x1 - from, colours.muted, 1, 3);
  }

  drawStepLabels(context, axis, height) {
    const { colours } = this.theme;
    const ofStep = (value) => formatNumber(this.store.label(value));
    const { values, leftOut, label } = axis.byTime
      ? axis.timeTicks(8)
      : { values: ticks(axis.from, axis.to, 10, true), label: ofStep };
    let room = -Infinity;
    for (const value of values) {
      const x = axis.byTime ? axis.xOfMoment(value) : axis.x(value);
      if (x === null || x > axis.x1) continue;
      const next = tickLabel(context, label(value), x, height - 6, colours.muted, axis.x1 + REACH, room);
      if (next === room) continue;
      room = next;
      context.fillStyle = colours.hairline;
      context.fillRect(x, height - BOTTOM, 1, 4);
    }
    text(context, axis.byTime ? "time" : "step", axis.x0 - 8, height - 6, colours.muted, SMALL, "right");
    if (!leftOut || !hasRoomAtRight(this.width)) return;
    text(context, `${formatSeconds(leftOut)} idle left out`, axis.x1 + 16, height - 6, colours.muted, SMALL);
  }

  drawLegend(context, axis, binned, height) {
    const { theme } = this, { colours } = theme, x = axis.x1 + 16;
    const bars = [
      { name: "prefill tokens", mark: box(colours.prefill, 12, 8) },
      { name: "decode tokens", mark: box(colours.decode, 12, 8) },
      { name: "unused budget", mark: layers(frame(colours.hairline, 12, 8), hatched(colours.decode, 12, 8)) },
    ];
    const bins = [
      { name: "range and mean", mark: layers(box(colours.kv, 12, 8), box(colours.prefill, 12, 1.5)) },
      { name: "mean decode tokens", mark: box(colours.decode, 12, 8) },
    ];
    const entries = [
      ...(binned ? bins : bars),
      { name: "token budget", mark: dashed(colours.text, 12, [4, 2]) },
      { name: "max_num_seqs", mark: dashed(colours.muted, 12, [1, 3]) },
      ...(this.outlined(axis)
        ? [{
          name: `run ${this.view.drawsSecond ? "A" : "B"}${this.view.comparison?.fork?.predicted ? ", predicted" : ""}`,
          mark: frame(colours.cursor, 12, 8),
        }]
        : []),
      ...(this.view.stalls.length ? [{ name: "stall", mark: box(theme.event("stall").colour, 2, 10) }] : []),
    ];
    const kinds = ["admit", "preempt", "finish", "resume", ...(this.store.hasAborts ? ["abort"] : [])];
    const events = kinds.map((kind) => ({
      name: kind,
      mark: (context, x) => eventMark(context, theme, kind, x + 5, 0, 3),
    }));
    const room = hasRoomAtRight(this.width);
    this.legend.show(room ? [] : [...entries, ...events], this.width, colours.muted);
    if (!room) return;
    // Below are two lines of events, and the idle time that is left out.
    const line = Math.min(15, Math.floor((height - 6 - (TOP + 6)) / (entries.length + 2)));
    entries.forEach((entry, i) => legendEntry(context, entry, x, TOP + 4 + i * line, x + 18, colours.muted));
    const y = TOP + 6 + entries.length * line, lefts = [0, 46, 104, 0, 58], tops = [0, 0, 0, line, line];
    events.forEach((entry, i) => {
      legendEntry(context, entry, x + lefts[i], y + tops[i], x + lefts[i] + 13, colours.muted);
    });
  }

  showsOverlay() {
    return false;
  }

  cursorBottom() {
    return this.height - BOTTOM + 2;
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x) {
    const step = this.axis().stepAt(x);
    return step < 0 ? null : { step, hover: { step }, lines: this.summary(step) };
  }

  summary(step) {
    const { store } = this;
    const lines = [store.sentence(step) || `step ${formatNumber(store.label(step))}`, ...numbersOf(store, step)];
    for (const stall of this.view.stalls) if (stall.step === step) lines.push(`stall: ${plain(stall.words, 200)}`);
    for (const { kind, request, words } of store.events(step).slice(0, 6)) {
      lines.push(`${kind} ${nameOf(request)}${words ? `: ${plain(words, 80)}` : ""}`);
    }
    return lines;
  }

  describe() {
    if (!this.store.numSteps) return "no steps yet";
    return `${counted(this.store.numSteps, "step")}. ${this.store.sentence(this.cursor.step)}`;
  }

  tableData() {
    const { store } = this;
    const headings = ["prefill", "decode", "budget", "running", "waiting", "free blocks", "duration"];
    return this.stepTable(headings, (step) => [
      store.value("prefill_tokens", step),
      store.value("decode_tokens", step),
      store.value("token_budget", step),
      store.value("num_running", step),
      store.value("num_waiting", step),
      store.value("free_blocks", step),
      store.timed() ? formatSeconds(store.duration(step)) : "–",
    ]);
  }
}

// Two runs of one workload, this one (A) above the line and the other (B) below it: mirrored in the timeline, and in a
// row for every request that shows its chunks or its tokens; with the gains and losses of each request, and the first
// divergence of the runs. The findings (workbench/trace/readings/compare.py) come with the packet of the second run,
// and are only drawn here.

import {
  counted,
  formatNumber,
  formatSeconds,
  h,
  plain,
  replace,
  rowButton,
  select,
  setText,
  tableHead,
} from "./dom.js";
import { eventMark, fitting, hatch, requestLabel, SMALL, text, tickLabel, ticks } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { nameOf, waitsOf } from "./request.js";
import { sharedClock } from "./shared_clock.js";
import { upperBound } from "./sorted.js";
import { stretchTicks } from "./time_axis.js";
import { LEFT, markDifference, RIGHT, tokenAt, TokenLanes } from "./token_lanes.js";
import { fillMeasures, forkWords } from "./what_if.js";
import { heldOf } from "./words.js";

const MIRROR = 96, ROW = 24, HALF = 9, TOP = 22, MAX_ROWS = 24, EVENT_SIZE = 3;

/** The changes of a request's state that have a mark. */
const EVENTS = { preempted: "preempt", aborted: "abort" };

/** The words for two runs, this one and another. */
const reading = (a, b) => `Top: ${a} (A). Bottom: ${b} (B)`;

const READING = reading("this run", "what if");

/** The words for a run, with the steps of a part. */
const sideOf = (store, name) => store.isPart ? `${heldOf(store)} of ${name}` : name;

/** The words for two simulated runs. */
const bothAre = (how) => reading(`this run as it was, ${how}`, `what if, ${how}`);

const SECOND = "Top: the run that was kept (A), outlined in the timeline. Bottom: the run that is drawn (B)";

const ALIGNMENTS = [
  ["step", "aligned by step"],
  ["arrival", "aligned by arrival"],
  ["time", "aligned by time"],
];
const LATENCIES = ["TTFT A", "B", "Δ", "ITL A", "B", "Δ"], COUNTS = ["recomputed A", "B", "Δ"];

/**
 * The step of one run in which a request has the chunk that it has in a step of the other, or had before it: a
 * predicted run may have steps more or fewer. It is the same step if one of them does not have the request.
 */
function stepIn(store, other, step, id) {
  if (store === other) return step;
  const here = store.byId.get(id)?.chunkSteps ?? [], there = other.byId.get(id)?.chunkSteps ?? [];
  if (!here.length || !there.length) return step;
  return here[Math.min(Math.max(0, upperBound(there, step) - 1), here.length - 1)];
}

/** A note as a sentence. */
const sentenceOf = (note) => `${note.slice(0, 1).toUpperCase()}${plain(note.slice(1), 240)}.`;

export class ComparePanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "compare", title: "Compare", hint: READING, height: 200 });
    this.badge = h("span", { class: "wb-badge" });
    const jump = () => this.goToDivergence();
    this.jump = h("button", { class: "wb-button", onclick: jump }, "Go to the first divergence");
    this.verdict = h("p", { class: "wb-verdict" });
    this.measures = h("div", { class: "wb-measures" });
    this.summary = h("p", { class: "wb-facts" });
    this.align = select("Align the two runs by", ALIGNMENTS, () => this.realign());
    const contents = [["chunks", "rows: chunks"], ["tokens", "rows: tokens"]];
    this.rowsOf = select("Rows of the requests", contents, () => this.redraw());
    this.meanRow = h("tbody", { class: "wb-mean" });
    this.gainRows = h("tbody");
    this.gainTable = h("table", { class: "wb-table" });
    this.gains = h("div", { class: "wb-scroll", tabindex: 0 }, this.gainTable);
    this.element.hidden = true;
    const close = h("button", { class: "wb-quiet", type: "button", title: "Close the comparison" }, "Close");
    close.onclick = () => this.view.showComparison(false);
    this.tools.append(this.align, this.rowsOf, close);
    this.body.prepend(h("div", { class: "wb-bar" }, this.badge, this.jump), this.verdict, this.measures, this.summary);
    this.body.append(this.gains);
  }

  get other() {
    return this.view.other;
  }

  /** Runs a and b; with a simulated b, a is this run or, if it was simulated too, its simulation. */
  get stores() {
    return this.view.drawsSecond ? [this.other, this.store] : [this.view.unchanged ?? this.store, this.other];
  }

  /** The words for the two runs. */
  get reading() {
    if (this.view.unchanged) return bothAre(this.findings.fork?.predicted ? "predicted" : "simulated to its end");
    return this.findings.fork ? READING : this.view.drawsSecond ? SECOND : reading(...this.sides);
  }

  /** The words for two runs that a person has chosen. */
  get sides() {
    return [sideOf(this.stores[0], "this run"), sideOf(this.stores[1], "the other run")];
  }

  get findings() {
    return this.view.comparison;
  }

  /** Whether there are two runs that can be compared. */
  get comparable() {
    return Boolean(this.other) && !this.findings.refused;
  }

  needs(what) {
    return what !== "status" && what !== "pin";
  }

  /** Whether both runs have the ids of their tokens; some recorders leave them out, and then nothing can differ. */
  get hasTokens() {
    return typeof this.findings.same_tokens === "boolean";
  }

  /** Index of the first different token of a request's two runs; -1 for none, or if it is not known. */
  differenceOf(id) {
    const { differences } = this.findings;
    return Object.hasOwn(differences, id) ? differences[id] : -1;
  }

  /** Whether both runs have times. */
  get bothTimed() {
    return this.stores.every((store) => store.timed());
  }

  changesPicture(what) {
    return what !== "hover" && what !== "step";
  }

  layout() {
    if (!this.comparable) {
      if (this.other) this.refuse(this.findings.refused);
      return this.setHeight(1);
    }
    const { findings } = this;
    this.rows = findings.rows.slice(0, MAX_ROWS).map(([id]) => this.stores.map((store) => store.byId.get(id)));
    const inSeconds = findings.unit === "s";
    this.tokens = this.rowsOf.value === "tokens" ? new TokenLanes(this, inSeconds) : null;
    const byTime = this.align.querySelector("[value=time]");
    byTime.hidden = byTime.disabled = !this.bothTimed;
    // Times or steps, as all other panels have them.
    if (this.align.value !== "arrival") this.align.value = this.cursor.byTime && this.bothTimed ? "time" : "step";
    for (const element of [this.align, this.rowsOf, this.gains]) element.hidden = false;
    this.setHeight(TOP + MIRROR + 22 + this.rows.length * ROW + 22);
    // A simulation repeats the tokens of its run: that they are the same says nothing.
    this.badge.hidden = Boolean(findings.fork);
    setText(this.badge, findings.badge);
    this.badge.dataset.state = findings.same_tokens ? "running" : findings.same_tokens === false ? "bad" : "";
    this.jump.hidden = !findings.first_divergence;
    setText(this.verdict, findings.verdict || "");
    fillMeasures(this.measures, findings, this.view);
    setText(this.summary, this.summaryOf(findings));
    const rows = this.tokens
      ? `bars: ${inSeconds ? "time" : "steps"} since the previous token, up to ${this.write(this.tokens.longest)}`
      : `cells: chunks, lines: waiting${this.eventWords()}`;
    const all = findings.rows.length,
      few = all > MAX_ROWS ? `; the ${MAX_ROWS} of ${formatNumber(all)} requests with the largest changes` : "";
    const cross = findings.same_tokens === false ? "; × marks the first different token" : "";
    const { clock } = this, leftOut = clock ? clock.stretches(0, clock.end).leftOut : 0;
    const time = leftOut ? `; one time for both, without ${formatSeconds(leftOut)} in which both were idle` : "";
    setText(this.hintElement, `${this.reading}; ${rows}${few}${cross}${time}`);
    this.fillGains();
  }

  /** The words for the marks of events that the rows have. */
  eventWords() {
    const states = new Set(this.rows.flat().flatMap(({ changes }) => changes.map(({ state }) => state)));
    const triangles = states.has("preempted") ? ", triangles: preemptions" : "";
    return states.has("aborted") ? `${triangles}, crosses: aborts` : triangles;
  }

  refuse(reason) {
    this.badge.hidden = false;
    setText(this.badge, "cannot be compared");
    setText(
      this.hintElement,
      this.findings.fork ? READING : this.sides.map((side, i) => `${"AB"[i]}: ${side}`).join(". "),
    );
    setText(this.summary, reason);
    setText(this.verdict, "");
    this.measures.hidden = true;
    for (const element of [this.jump, this.align, this.rowsOf, this.gains]) element.hidden = true;
  }

  summaryOf({ first_divergence: parted, unit, notes, fork }) {
    const simulated = fork ? `The run below is simulated ${forkWords(fork)}.` : "";
    const arrivals = fork && unit === "steps"
      ? "Requests keep the step in which they arrived: one that met an idle engine may wait in the run below."
      : "";
    const where = parted
      ? `First divergence: step ${parted.step}, ${this.nameOf(parted.request)}: ${plain(parted.what, 160)}.`
      : "The schedules never differ.";
    let clock = unit === "s" ? "" : "Times are in steps, because one of the runs has no clock.";
    if (fork?.no_times) clock = `Times are in steps: ${plain(fork.no_times.split(". ")[0], 200)}.`;
    if (fork?.predicted) clock = plain(fork.predicted, 900);
    const grown = fork?.up_to < this.store.label(this.cursor.last)
      ? `This run has grown since: B was simulated from its steps up to ${formatNumber(fork.up_to)}.`
      : "";
    return [simulated, grown, arrivals, where, clock, ...notes.map(sentenceOf)].filter(Boolean).join(" ");
  }

  // -- gains and losses ------------------------------------------------------------------------------------------

  /** Write a time. */
  write(value) {
    return this.findings.unit === "s" ? formatSeconds(value) : formatNumber(value);
  }

  fillGains() {
    const { rows, mean, rounding, counts_only: countsOnly } = this.findings;
    const time = (value) => this.write(value), count = (value) => formatNumber(value);
    /** @type {(name: any, props: any, values: any[]) => any} */
    const row = (name, props, [ttftA, ttftB, itlA, itlB, wasteA, wasteB]) => {
      const times = countsOnly ? [] : [...pair(ttftA, ttftB, time, rounding), ...pair(itlA, itlB, time, rounding)];
      const cells = [...times, ...pair(wasteA, wasteB, count, 0)];
      return h("tr", props, h("td", {}, name), cells.map((cell) => h("td", { class: "wb-number" }, cell)));
    };
    const headings = ["request", ...(countsOnly ? [] : LATENCIES), ...COUNTS];
    replace(this.gainTable, tableHead(headings), this.meanRow, this.gainRows);
    const select = (id) => ({ onclick: () => this.cursor.select(this.store.byId.get(id).index) });
    const shown = rows.filter(([, ...values]) => hasNumber(values));
    this.gains.hidden = !shown.length;
    // A mean ITL is one of tokens, as in the table of measures: requests with more of them count more.
    const title = "TTFT and recomputed tokens: the mean of the requests. ITL: the mean of all gaps between two tokens";
    const label = countsOnly || !hasNumber(mean?.slice(2, 4) ?? []) ? "mean" : "mean (ITL: of all gaps)";
    replace(this.meanRow, shown.length > 1 && mean ? row(label, label === "mean" ? {} : { title }, mean) : "");
    replace(
      this.gainRows,
      shown.map(([id, ...values]) => row(rowButton(h("bdi", {}, this.nameOf(id))), select(id), values)),
    );
  }

  /** The name of a request for a reader. */
  nameOf(id) {
    return nameOf(this.store.byId.get(id) ?? { id, own: false });
  }

  /** The axis of all panels becomes the chosen one. */
  realign() {
    const { cursor, view } = this, { value } = this.align;
    if (value !== "arrival" && this.store.timed()) cursor.axis = value;
    view.changed("range");
    this.redraw();
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  /** The clock of both runs, if they are aligned by time. */
  get clock() {
    return this.align.value === "time" && this.bothTimed ? sharedClock(...this.stores) : null;
  }

  /** Set the functions from steps to pixels: (store, step), for the chosen alignment, and the arrival to align by. */
  scale() {
    const { stores } = this, width = this.width - RIGHT - LEFT, { clock } = this;
    this.timed = Boolean(clock);
    this.end = clock ? clock.end : Math.max(...stores.map((store) => store.numSteps));
    const xOf = (at) => LEFT + (at / this.end) * width;
    this.x = (store, step, origin = 0) => {
      const { starts, ends } = clock?.times.get(store) ?? {};
      return xOf(clock ? starts[step] ?? ends.at(-1) : step - origin);
    };
    this.right = (store, step, origin = 0) => xOf(clock ? clock.times.get(store).ends[step] : step + 1 - origin);
    this.xOfMoment = (moment) => xOf(clock.at(moment));
  }

  draw(context) {
    if (!this.comparable) return;
    this.scale();
    this.drawMirror(context);
    this.drawDifferences(context);
    this.drawRows(context);
  }

  /** The tokens of every step in both runs. */
  drawMirror(context) {
    const { stores } = this, { colours } = this.theme, middle = TOP + MIRROR / 2, half = MIRROR / 2 - 4;
    let most = 1;
    for (const store of stores) {
      for (let step = 0; step < store.numSteps; step++) most = Math.max(most, store.numTokens(step));
    }
    stores.forEach((store, run) => {
      const sign = run ? 1 : -1;
      context.fillStyle = run ? colours.decode : colours.prefill;
      for (let step = 0; step < store.numSteps; step++) {
        const x = this.x(store, step), wide = Math.max(0.6, this.right(store, step) - x - 0.5);
        const high = (store.numTokens(step) / most) * half;
        context.fillRect(x, run ? middle + 4 : middle - 4 - high, wide, high);
      }
      const label = `${run ? "B" : "A"}: ${counted(store.numSteps, "step")}`;
      text(context, label, LEFT - 8, middle + sign * half * 0.6, colours.muted, SMALL, "right");
    });
    const strip = this.timed ? [] : ["the strip marks steps in which A (above) or B (below) has more"];
    const parts = ["tokens per step", ...strip];
    text(context, fitting(context, parts, "; ", this.width - LEFT, SMALL), LEFT, 9, colours.muted, SMALL);
    const { values, label } = this.timed
      ? stretchTicks(this.clock.stretches(0, this.end).stretches, this.end, 8, this.xOfMoment, this.width - RIGHT)
      : { values: ticks(0, this.end, 8, true), label: formatNumber };
    let room = -Infinity;
    for (const tick of values) {
      const x = this.timed ? this.xOfMoment(tick) : LEFT + (tick / this.end) * (this.width - RIGHT - LEFT);
      room = tickLabel(context, label(tick), x, TOP + MIRROR + 8, colours.muted, this.width, room);
    }
  }

  /** The strip between the runs: steps in which they schedule different numbers of tokens. */
  drawDifferences(context) {
    const [a, b] = this.stores, middle = TOP + MIRROR / 2;
    if (this.timed) return;
    context.fillStyle = this.theme.colours.cursor;
    for (let step = 0; step < Math.min(a.numSteps, b.numSteps); step++) {
      const difference = b.numTokens(step) - a.numTokens(step), x = this.x(a, step);
      if (!difference) continue;
      context.fillRect(x, difference > 0 ? middle : middle - 3, Math.max(0.8, this.x(a, step + 1) - x), 3);
    }
  }

  /** Go to the step of the run on display in which the request of the first divergence is where it is in A. */
  goToDivergence() {
    const { step, request } = this.findings.first_divergence, [a] = this.stores;
    this.cursor.seek(stepIn(this.store, a, step - a.label(0), request));
  }

  /** Middle of a request's row: its first run is above, its second below. */
  middle(row) {
    return TOP + MIRROR + 22 + row * ROW + ROW / 2 - 2;
  }

  drawRows(context) {
    const { theme, tokens } = this, { colours } = theme;
    if (tokens) tokens.drawAxis(context, this.width, this.middle(this.rows.length) - 2, colours);
    this.rows.forEach((pair, row) => {
      const middle = this.middle(row);
      requestLabel(context, theme, this.drawn(pair), LEFT - 8, middle);
      if (tokens) tokens.drawLane(context, row, this.width, middle, HALF, theme);
      else this.drawChunks(context, pair, middle);
      context.fillStyle = colours.hairline;
      context.fillRect(LEFT, middle + ROW / 2, this.width - RIGHT - LEFT, 1);
    });
  }

  /** Of the two requests of a row, that of the run which the other panels draw: its colour and number are theirs. */
  drawn(pair) {
    const request = pair[this.view.drawsSecond ? 1 : 0];
    return this.view.unchanged ? this.store.byId.get(request.id) ?? request : request;
  }

  drawChunks(context, [a, b], middle) {
    const { theme } = this, { colours } = theme, difference = this.differenceOf(a.id);
    const own = this.drawn([a, b]).index;
    [a, b].forEach((request, run) => {
      const store = this.stores[run], origin = this.align.value === "arrival" ? request.arrival_step : 0;
      context.fillStyle = colours.muted;
      for (const { begin, until } of waitsOf(store, request)) {
        const x = this.x(store, begin, origin);
        context.fillRect(x, middle + (run ? 4 : -5), this.x(store, until, origin) - x, 1);
      }
      request.chunks.forEach((index, i) => {
        const chunk = store.chunk(index), step = request.chunkSteps[i], high = chunk.decode ? 4 : 8;
        const x = this.x(store, step, origin), wide = Math.max(0.8, this.right(store, step, origin) - x);
        const y = run ? middle + 0.5 : middle - 0.5 - high;
        context.fillStyle = chunk.decode ? theme.decode(own) : theme.prefill(own);
        context.fillRect(x, y, wide, high);
        if (chunk.recomputed) hatch(context, x, y, wide, high, colours.background, 3);
      });
      const y = run ? middle + HALF / 2 : middle - HALF / 2;
      for (const { step, state } of request.changes) {
        const kind = step < 0 ? null : EVENTS[state];
        if (kind) eventMark(context, theme, kind, this.x(store, step, origin) + EVENT_SIZE, y, EVENT_SIZE);
      }
      const token = tokenAt(request, difference);
      if (!token) return;
      markDifference(context, this.x(store, token.step, origin), y, HALF / 2, colours.bad);
    });
  }

  showsOverlay() {
    return true;
  }

  drawOverlay(context, _width, height) {
    if (!this.comparable || !this.x || this.align.value === "arrival") return;
    const bottom = this.tokens ? TOP + MIRROR : height;
    context.fillStyle = this.theme.colours.cursor;
    const drawn = this.stores[this.view.drawsSecond ? 1 : 0], { step } = this.cursor;
    const id = this.store.chunks(step)[0]?.request.id;
    const there = Math.min(stepIn(drawn, this.store, step, id), drawn.numSteps - 1);
    context.fillRect(this.x(drawn, there) - 0.75, TOP - 4, 1.5, bottom - TOP);
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x, y) {
    if (!this.comparable || !this.rows) return null;
    const row = Math.round((y - this.middle(0)) / ROW), pair = y > TOP + MIRROR + 18 ? this.rows[row] : null;
    if (!pair) return this.mirrorHit(x, y);
    const [a, b] = pair, request = this.drawn(pair), hover = { request: request.index };
    const token = this.tokens && x >= LEFT ? this.tokens.describe(row, this.tokens.at(x, this.width)) : null;
    if (token) return { hover, request, ...token };
    const difference = this.differenceOf(a.id);
    const end = ({ tokens, chunkSteps, changes }) => {
      const [preempted, aborted] = ["preempted", "aborted"].map((state) =>
        changes.filter((change) => change.state === state && change.step >= 0).length
      );
      return [
        counted(tokens.length, "token"),
        `last scheduled in step ${chunkSteps.at(-1) ?? "–"}`,
        ...(preempted ? [counted(preempted, "preemption")] : []),
        ...(aborted ? ["aborted"] : []),
      ].join(", ");
    };
    const lines = [nameOf(a), `A: ${end(a)}`, `B: ${end(b)}`];
    if (difference >= 0) lines.push(`the first difference is token ${difference + 1}`);
    else if (!this.hasTokens) lines.push("no tokens to compare");
    else {lines.push(
        a.tokens.length === b.tokens.length ? "the same tokens" : "the same tokens as far as both have them",
      );}
    return { hover, request, lines };
  }

  mirrorHit(x, y) {
    if (this.timed || x < LEFT || y > TOP + MIRROR) return null;
    const step = Math.floor(((x - LEFT) / (this.width - RIGHT - LEFT)) * this.end);
    return step < this.store.numSteps ? { step, hover: { step }, lines: [`step ${this.store.label(step)}`] } : null;
  }

  clicked(hit) {
    if (hit.step !== undefined) this.cursor.seek(hit.step);
    else this.cursor.select(hit.request.index);
  }

  describe() {
    const { findings } = this;
    return findings ? findings.refused || (findings.fork ? findings.verdict : findings.badge) : "";
  }

  tableData() {
    const latencies = this.findings?.counts_only ? [] : ["TTFT A", "TTFT B", "ITL A", "ITL B"];
    const gains = [...latencies, "recomputed A", "recomputed B"];
    const cells = ([id, ...values]) => {
      const difference = this.differenceOf(id), none = this.hasTokens ? "none" : "not known";
      const written = values.map((value, i) => (i < 4 ? this.write(value) : value)).slice(-gains.length);
      return [this.nameOf(id), ...written, difference < 0 ? none : difference + 1];
    };
    return {
      caption: this.describe(),
      headings: ["request", ...gains, "first different token"],
      rows: (this.findings?.rows || []).map(cells),
    };
  }
}

/** Whether a row says anything: a latency, or recomputed tokens. Runs without comparable steps have no latencies. */
function hasNumber(values) {
  return values.some((value, i) => i < 4 ? value !== null : value > 0);
}

/** The values of both runs, and the change from a to b; one by no more than this share of them is rounding. */
function pair(a, b, write, rounding) {
  if (a === null || b === null) return [write(a), write(b), "–"];
  const change = b - a,
    sign = change > 0 ? "+" : "−",
    isSame = Math.abs(change) <= rounding * Math.max(Math.abs(a), Math.abs(b));
  return [write(a), write(b), isSame ? "0" : `${sign}${write(Math.abs(change))}`];
}

// A recording as an incident: load, latencies, KV blocks, queue and stalls on one axis of time; above them the whole
// run, in which a drag chooses a part; below them the slow requests with their causes, and the properties they share.

import { arrivalsIn, binned, boundOf, percentile } from "./bins.js";
import { counted, formatNumber, formatSeconds, h, plain, replace, setText, table, timeWords } from "./dom.js";
import { hatch, outlinedText, SMALL, text, textWidth, tickLabel } from "./drawing.js";
import { box, legendEntry } from "./legend.js";
import { CanvasPanel } from "./panel.js";
import { isOver, nameOf } from "./request.js";
import { upperBound } from "./sorted.js";
import { hasRoomAtRight, marginOf } from "./step_axis.js";
import { timeTicks } from "./time_axis.js";

const WHOLE = 40, AXIS = 18, ROW = 44, MOST_SLOW = 8;

/** Stretches of a picture. Not by its width, or every number would be another one in another window. */
const STRETCHES = 120;

/** Seconds of a stretch from which its requests are a rate; in a shorter one they are counted. */
const SHORTEST_RATE = 1;

/** Number of characters above which an id is shortened, as in pictures. */
const LONG_NAME = 28;

const HINT = "drag over a part of the run to see only that; a double click shows all";

/** A drag over fewer pixels is a click. */
const CLICK = 4;

/** Growth of the run after which the host is asked again. */
const GROWTH = 1.05;

const share = (value) => `${formatNumber(Number((100 * value).toPrecision(2)))}%`;

/**
 * The rows: `values` of a stretch, `write` for them, and `of(whole)`, which is 0 in a run that has nothing to show.
 * Rows of latencies have two values, P99 and P50, on a logarithmic scale.
 */
const ROWS = [
  {
    name: (width) => width < SHORTEST_RATE ? `requests in ${formatSeconds(width)}` : "requests per second",
    values: (bin, width) => [width < SHORTEST_RATE ? bin.arrivals : bin.arrivals / width],
    of: (whole) => whole.arrivals,
    write: (value) => formatNumber(value, 2),
  },
  {
    name: "time to first token",
    values: (bin) => percentiles(bin.first),
    of: (whole) => whole.first.length,
    write: formatSeconds,
    log: true,
  },
  {
    name: "inter-token latency",
    values: (bin) => percentiles(bin.next),
    of: (whole) => whole.next.length,
    write: formatSeconds,
    log: true,
  },
  { name: "KV blocks in use", values: (bin) => [bin.kv], of: (whole) => whole.kv, write: share },
  {
    name: "hit rate",
    values: (bin) => [bin.hit / bin.queried],
    of: (whole) => whole.hit,
    write: share,
  },
  { name: "waiting requests", values: (bin) => [bin.waiting], of: (whole) => whole.waiting, write: formatNumber },
  { name: "preemptions", values: (bin) => [bin.preemptions], of: (whole) => whole.preemptions, write: formatNumber },
  { name: "aborted requests", values: (bin) => [bin.aborts], of: (whole) => whole.aborts, write: formatNumber },
];

const percentiles = (sorted) => [percentile(sorted, 99), percentile(sorted, 50)];

export class IncidentPanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "incident",
      title: "What happened",
      hint: HINT,
      height: WHOLE + AXIS + 6 * ROW,
    });
    this.numbers = h("p", { class: "wb-facts" });
    this.holder.before(this.numbers);
    this.apart = h("ul", { class: "wb-apart" });
    this.slow = h("div", { class: "wb-slow" });
    this.apartTitle = h("h3", {}, "What sets the slowest 1% apart");
    const apart = h("section", {}, this.apartTitle, this.apart), slow = h("section", {}, this.slow);
    this.body.append(h("div", { class: "wb-incident" }, slow, apart));
    this.asked = 0; // number of steps when the host was asked last
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.drag = { from: event.offsetX, to: event.offsetX };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.drag) return;
      this.drag.to = event.offsetX;
      this.cursor.onChange("hover");
    });
    this.canvas.addEventListener("pointerup", () => this.dropped());
    this.canvas.addEventListener("pointercancel", () => {
      this.drag = null;
    });
    this.canvas.addEventListener("dblclick", () => this.cursor.fit());
  }

  needs(what) {
    return what !== "pin";
  }

  changesPicture(what) {
    return what !== "hover" && what !== "step" && what !== "select";
  }

  // -- time ------------------------------------------------------------------------------------------------------

  /** Seconds since the start of the trace: [from, to] of the whole run, or of its visible steps. */
  time(visible) {
    const { store } = this, [first, last] = this.steps(visible);
    const begin = first ? store.value("time", first) : Math.min(store.value("time", 0), this.store.firstArrival());
    return [begin, Math.max(begin + 1e-6, store.value("end", last))];
  }

  /** The first and the last step of the whole run, or of what is visible. */
  steps(visible) {
    const { numSteps } = this.store, [from, to] = visible ? this.cursor.range : [0, numSteps];
    const first = Math.min(numSteps - 1, Math.max(0, Math.floor(from)));
    return [first, Math.min(numSteps, Math.max(first + 1, Math.ceil(to))) - 1];
  }

  /** Seconds of idle time between the visible steps. */
  idle() {
    const [first, last] = this.steps(true);
    return this.store.idleBetween(first, last);
  }

  /** The scale of a row of the picture: that of the whole run at the top, that of the visible part below it. */
  scale(visible) {
    const { left, right } = marginOf(this.width), x1 = this.width - right, [from, to] = this.time(visible);
    const x = (time) => left + ((time - from) / (to - from)) * (x1 - left);
    return { x, x0: left, x1, from, to, timeAt: (at) => from + ((at - left) / (x1 - left)) * (to - from) };
  }

  stepAt(time) {
    const { store } = this, times = store.column("time").subarray(0, store.numSteps);
    return Math.max(0, upperBound(times, time) - 1);
  }

  /** The end of a drag: it chooses the visible steps, in the run above or in the part below. */
  dropped() {
    const { drag, store, cursor } = this;
    this.drag = null;
    if (!drag || !store.numSteps || Math.abs(drag.to - drag.from) < CLICK) return this.cursor.onChange("hover");
    const { timeAt } = this.scale(!this.onWhole);
    const [from, to] = [drag.from, drag.to].sort((a, b) => a - b).map((x) => this.stepAt(timeAt(x)));
    cursor.moveTo(from, Math.max(6, to + 1 - from));
    cursor.setHover({}); // another step is under the pointer now
    this.view.tooltip.hide();
    if (cursor.step < from || cursor.step > to) cursor.seek(from, { stay: true });
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  layout() {
    const { store } = this;
    this.ask();
    this.shown = null;
    if (!store.numSteps || !store.timed()) return;
    const idle = this.idle();
    setText(this.hintElement, idle ? `${HINT}; time, with ${formatSeconds(idle)} idle` : HINT);
    const { whole, width } = this.shown = binned(store, this.steps(true), this.time(true), STRETCHES);
    this.rows = ROWS.filter((row) => row.of(whole) > 0)
      .map((row) => ({ ...row, name: typeof row.name === "string" ? row.name : row.name(width) }));
    this.setHeight(WHOLE + AXIS + this.rows.length * ROW);
  }

  draw(context) {
    const { colours } = this.theme;
    if (!this.shown) return text(context, "No times yet.", 84, 16, colours.muted);
    this.drawWhole(context);
    const axis = this.scale(true), { bins, width } = this.shown, wide = (axis.x1 - axis.x0) / bins.length;
    this.drawTimes(context, axis, WHOLE + AXIS / 2);
    this.drawNoStepYet(context, axis, WHOLE + AXIS, this.height - 4);
    this.drawStalls(context, axis, WHOLE + AXIS, this.height - 4);
    this.rows.forEach((row, i) => {
      const top = WHOLE + AXIS + i * ROW + 6, base = top + ROW - 14, values = bins.map((bin) => row.values(bin, width));
      const known = values.flat().filter((value) => value > 0), most = Math.max(...known);
      const least = row.log ? Math.min(...known) : 0, scale = row.log ? Math.log : (value) => value;
      const y = (value) => base - ((scale(value) - scale(least)) / (scale(most) - scale(least) || 1)) * (base - top);
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, base, axis.x1 - axis.x0, 1);
      values.forEach((of, bin) => {
        const x = axis.x0 + bin * wide;
        of.forEach((value, rank) => {
          if (!(value > 0)) return;
          context.fillStyle = rank ? colours.text : colours.owned;
          if (row.log) context.fillRect(x, y(value) - 1, wide, 2);
          else context.fillRect(x, y(value), Math.max(1, wide - 1), base - y(value));
        });
      });
      text(context, row.write(most), axis.x0 - 8, top + 3, colours.muted, SMALL, "right");
      if (row.log && least < most) text(context, row.write(least), axis.x0 - 8, base, colours.muted, SMALL, "right");
      this.drawName(context, axis, row, top);
    });
  }

  drawName(context, axis, { name, log = false }, top) {
    const { colours } = this.theme, x = axis.x1 + 16;
    if (!hasRoomAtRight(this.width)) {
      return outlinedText(context, name, axis.x0 + 4, top + 3, colours.text, colours.background, SMALL);
    }
    text(context, name, x, top + 7, colours.muted, SMALL);
    if (!log) return;
    legendEntry(context, { name: "P99", mark: box(colours.owned, 8, 2) }, x, top + 21, x + 12, colours.muted);
    legendEntry(context, { name: "P50", mark: box(colours.text, 8, 2) }, x + 44, top + 21, x + 56, colours.muted);
  }

  /** The whole run: its arrivals and stalls, and a frame around the visible part. */
  drawWhole(context) {
    const { colours } = this.theme, axis = this.scale(false), base = WHOLE - 6, top = 4;
    const wide = (axis.x1 - axis.x0) / STRETCHES, arrivals = arrivalsIn(this.store, axis.from, axis.to, STRETCHES);
    const most = Math.max(1, ...arrivals);
    context.fillStyle = colours.decode;
    arrivals.forEach((n, i) => {
      const height = (n / most) * (base - top);
      context.fillRect(axis.x0 + i * wide, base - height, Math.max(1, wide - 1), height);
    });
    context.fillStyle = colours.hairline;
    context.fillRect(axis.x0, base, axis.x1 - axis.x0, 1);
    text(context, this.store.isPart ? "this part" : "whole run", axis.x0 - 8, base - 8, colours.muted, SMALL, "right");
    this.drawStalls(context, axis, top, base);
    if (this.view.stalls.length && hasRoomAtRight(this.width)) {
      const stall = { name: "stall", mark: box(this.theme.event("stall").colour, 2, 10) };
      legendEntry(context, stall, axis.x1 + 19, base - 8, axis.x1 + 28, colours.muted);
    }
    const { from, to } = this.scale(true), left = axis.x(from), right = axis.x(to);
    if (from > axis.from || to < axis.to) this.drawEnds(context, axis);
    context.strokeStyle = colours.cursor;
    context.lineWidth = 1.5;
    context.strokeRect(left, top - 2, Math.max(2, right - left), base - top + 4);
  }

  /** The first and the last time of the whole run, whose axis is not the one below it. */
  drawEnds(context, axis) {
    const { colours } = this.theme, { zero } = this.store, [from, to] = [axis.from - zero, axis.to - zero];
    const [first, last] = this.ends = [from, to].map((time) => timeWords(time, to - from, 1));
    outlinedText(context, first, axis.x0 + 4, 10, colours.text, colours.background, SMALL);
    const right = axis.x1 - 4 - textWidth(context, last, SMALL);
    outlinedText(context, last, right, 10, colours.text, colours.background, SMALL);
  }

  drawTimes(context, axis, y) {
    const { colours } = this.theme;
    const { zero } = this.store, [from, to] = [axis.from - zero, axis.to - zero];
    const { values, label } = timeTicks(from, to, this.width < 500 ? 4 : 8);
    let room = -Infinity;
    for (const tick of values) {
      room = tickLabel(context, label(tick), axis.x(tick + zero), y, colours.muted, this.width, room);
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x(tick + zero), y + 6, 1, this.height - y - 6);
    }
    text(context, "time", axis.x0 - 8, y, colours.muted, SMALL, "right");
    if (!this.idle() || !hasRoomAtRight(this.width)) return;
    text(context, "with idle time", axis.x1 + 16, y, colours.muted, SMALL);
  }

  /** The requests that wait for the first step, from the arrival of the first of them; "" without such a time. */
  noStepYet() {
    const { store } = this, first = store.value("time", 0);
    if (store.firstArrival() >= first) return "";
    const waiting = store.requests.filter((request) => request.arrival_time < first).length;
    return `no step yet: ${counted(waiting, "request")} ${waiting === 1 ? "waits" : "wait"} for step 0`;
  }

  /** Mark the time before the first step, in which no row has a value. */
  drawNoStepYet(context, axis, top, bottom) {
    const words = this.noStepYet(), right = Math.min(axis.x1, axis.x(this.store.value("time", 0)));
    if (!words || right - axis.x0 < 1) return;
    const { colours } = this.theme;
    hatch(context, axis.x0, top, right - axis.x0, bottom - top, colours.hairline, 6);
    if (textWidth(context, words, SMALL) + 12 > right - axis.x0) return;
    outlinedText(context, words, axis.x0 + 6, (top + bottom) / 2, colours.text, colours.background, SMALL);
  }

  drawStalls(context, axis, top, bottom) {
    context.fillStyle = this.theme.event("stall").colour;
    for (const { time } of this.view.stalls) {
      if (time >= axis.from && time <= axis.to) context.fillRect(axis.x(time) - 1, top, 2, bottom - top);
    }
  }

  showsOverlay() {
    return Boolean(this.shown);
  }

  drawOverlay(context) {
    const { cursor, drag } = this, axis = this.scale(true), { colours } = this.theme;
    const now = this.store.value("time", cursor.step);
    context.fillStyle = colours.cursor;
    const top = WHOLE + AXIS;
    if (now >= axis.from && now <= axis.to) context.fillRect(axis.x(now), top, 1.5, this.height - top);
    if (!drag || Math.abs(drag.to - drag.from) < CLICK) return;
    context.globalAlpha = 0.2;
    const [high, low] = this.onWhole ? [0, WHOLE - 4] : [top, this.height];
    context.fillRect(Math.min(drag.from, drag.to), high, Math.abs(drag.to - drag.from), low - high);
    context.globalAlpha = 1;
  }

  // -- what the host knows -----------------------------------------------------------------------------------------

  /** Ask a host that can explain; a saved page has the answer already. */
  ask() {
    const { view, store } = this;
    if (view.live || !view.status.explains || !store.facts.incident || store.numSteps < GROWTH * this.asked) return;
    if (!store.numSteps || !store.timed()) return;
    this.asked = store.numSteps;
    view.send("look");
  }

  render(stale) {
    super.render(stale);
    if (!this.shown || ![...stale].some((what) => what === "status" || this.changesPicture(what))) return;
    setText(this.numbers, this.words());
    this.showSlow();
    const apart = this.view.status.incident?.apart ?? [];
    replace(this.apart, apart.map((sentence) => h("li", {}, plain(sentence, 200))));
    this.apartTitle.parentElement.hidden = !apart.length;
  }

  /** The numbers of the visible part. */
  words() {
    const { whole } = this.shown,
      [from, to] = this.time(true),
      latency = (name, ended, open = []) => {
        const [median, most] = [50, 99].map((percent) => boundOf(ended, open, percent, formatSeconds));
        return ended.length + open.length ? `${name} ${median} (P50), ${most} (P99)` : "";
      };
    const waits = this.withoutToken(from, to).filter(({ at }) => at === to).map(({ ttft }) => ttft);
    const stalls = this.view.stalls.filter(({ time }) => time >= from && time <= to).length;
    return [
      this.requestWords(whole.arrivals, from, to),
      latency("first token", whole.first, waits),
      waits.length ? `${waits.length} without a first token for up to ${formatSeconds(Math.max(...waits))}` : "",
      latency("next token", whole.next),
      `KV blocks up to ${share(whole.kv)}`,
      whole.queried ? `hit rate ${share(whole.hit / whole.queried)} of prompt tokens` : "",
      counted(whole.preemptions, "preemption"),
      whole.aborts ? `${formatNumber(whole.aborts)} aborted` : "",
      `up to ${formatNumber(whole.waiting)} waiting`,
      counted(stalls, "stall"),
    ].filter(Boolean).join("; ");
  }

  /** The number of requests that were there in the visible part, and of those that arrived in it if they are fewer. */
  requestWords(arrivals, from, to) {
    const { store } = this, [first, last] = this.steps(true), isEnd = last === store.numSteps - 1;
    const isGone = ({ changes }) => changes.length > 0 && isOver(changes.at(-1).state) && changes.at(-1).step < first;
    const here = store.requests.filter((each) => (isEnd || !(each.arrival_time > to)) && !isGone(each)).length;
    const arrived = arrivals < here ? `, ${arrivals ? formatNumber(arrivals) : "none"} arrived here` : "";
    return `${counted(here, "request")} in ${this.lengthWords(from, to)}${arrived}`;
  }

  /** The length of the visible part; of one that begins with the first arrival also that from step 0 on. */
  lengthWords(from, to) {
    const whole = timeWords(to - from, to - from), first = this.store.value("time", 0);
    const sinceStep = timeWords(to - first, to - from);
    if (first <= from || sinceStep === whole) return whole;
    return `${whole} from the first arrival on, ${sinceStep} from step 0 on`;
  }

  /** The requests of the visible part that waited longest for their first token. */
  showSlow() {
    const { store } = this, [from, to] = this.time(true), causes = this.causes();
    const never = this.view.status.incident?.never ?? [];
    const slow = this.firstTokens().filter(({ at }) => at > from && at <= to).concat(this.withoutToken(from, to));
    slow.sort((a, b) => b.ttft - a.ttft);
    const rows = slow.slice(0, MOST_SLOW).map(({ request, ttft, open }) => {
      const [cause, part, culprits] = causes.get(request.id) ?? ["", 0, []];
      const others = culprits.map((id) => store.byId.get(id)?.label ?? plain(id)).join(", ");
      const words = [
        never.includes(request.id) && "never served",
        cause && `${share(part)} ${cause}${others ? `: ${others}` : ""}`,
      ].filter(Boolean).join("; ");
      const name = request.id.length > LONG_NAME ? request.label : nameOf(request);
      return { request, cells: [name, `${open ? "≥ " : ""}${formatSeconds(ttft)}`, words || "–"] };
    });
    const onclick = ({ request }) => this.view.inspector.pin({ kind: "request", request: request.index });
    if (!rows.length) return replace(this.slow, h("p", { class: "wb-note" }, "No request got its first token here."));
    const caption = "Slowest first tokens";
    replace(this.slow, table(["request", "first token", "biggest part"], rows, { caption, onclick }));
  }

  causes() {
    const { incident } = this.view.status;
    if (incident !== this.incident) {
      this.incident = incident;
      this.causeOf = new Map((incident?.slow ?? []).map(([id, ...rest]) => [id, rest]));
    }
    return this.causeOf ?? new Map();
  }

  /** The requests without any token until then, and their waits until a time or until they were gone. */
  withoutToken(from, to) {
    const { store } = this, found = [];
    for (const request of store.requests) {
      const arrival = request.arrival_time, first = request.tokens[0];
      if (request.numBefore || request.tokenBefore !== null) continue; // it had one before these steps
      if ((first && store.value("end", first.step) <= to) || !(arrival < to)) continue;
      const gone = request.finishReason ? store.value("time", request.changes.at(-1).step) : Infinity;
      const at = Math.min(gone, to);
      if (at > from) found.push({ request, ttft: at - arrival, at, open: true });
    }
    return found;
  }

  /** The time to first token of each request that has one, and when it came. */
  firstTokens() {
    const { store } = this, latency = store.column("chunk.latency"), flags = store.column("chunk.flags"), found = [];
    for (const request of store.requests) {
      const token = request.tokens[0], ttft = token && latency[token.chunk];
      if (token && flags[token.chunk] & store.facts.codes.first_token && ttft >= 0) {
        found.push({ request, ttft, at: store.value("end", token.step), open: false });
      }
    }
    return found;
  }

  // -- words -----------------------------------------------------------------------------------------------------

  pointer(event) {
    if (!this.drag) this.onWhole = event.offsetY < WHOLE;
    super.pointer(event);
  }

  hit(x, y) {
    if (!this.shown) return null;
    const axis = this.scale(y >= WHOLE);
    if (x < axis.x0 || x > axis.x1) return null;
    const time = axis.timeAt(x),
      step = this.stepAt(time),
      lines = [timeWords(time - this.store.zero, axis.to - this.store.zero, (axis.to - axis.from) / 1000)];
    const near = this.view.stalls.find((stall) => Math.abs(axis.x(stall.time) - x) <= 4);
    if (near) lines.push(`stall: ${near.words}`);
    if (time < this.store.value("time", 0) && this.noStepYet()) lines.push(this.noStepYet());
    const row = this.rows[Math.floor((y - WHOLE - AXIS) / ROW)];
    if (y >= WHOLE + AXIS && row) {
      const { bins, width } = this.shown, bin = bins[Math.min(bins.length - 1, Math.floor((time - axis.from) / width))];
      const values = row.values(bin, width).map((v) => (Number.isFinite(v) ? row.write(v) : "none"));
      lines.push(`${row.name}: ${row.log ? `P99 ${values[0]}, P50 ${values[1]}` : values[0]}`);
    }
    return { step, hover: { step }, lines };
  }

  clicked(hit, event) {
    if (event.detail < 2 && !this.drag) super.clicked(hit, event);
  }

  describe() {
    return this.shown ? this.words() : "no times yet";
  }

  tableData() {
    this.layout();
    if (!this.shown) return { headings: [], rows: [] };
    const { bins, width } = this.shown, [from, to] = this.time(true);
    const write = (row, bin) => row.values(bin, width).map((v) => (Number.isFinite(v) ? row.write(v) : "–")).join(", ");
    return {
      caption: this.words(),
      headings: ["from", ...this.rows.map(({ name, log }) => (log ? `${name}: P99, P50` : name))],
      rows: bins.map((
        bin,
        i,
      ) => [
        timeWords(from - this.store.zero + i * width, to - this.store.zero, width),
        ...this.rows.map((row) => write(row, bin)),
      ]),
    };
  }
}

// Two runs of one workload, mirrored: a above the line and b below it, in the timeline and for every request, whose rows
// show its chunks or its tokens; what each request gains or loses, and where the two runs part. The findings come with the packet of the second run
// (workbench/trace/compare.py); here they are only drawn.

import { formatNumber, formatSeconds, h, plain, replace, setText } from "./dom.js";
import { SMALL, hatch, requestLabel, text, ticks } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { MARGIN } from "./step_axis.js";
import { TokenLanes, firstDifference, markDifference, writeLatency } from "./token_lanes.js";

const MIRROR = 96, ROW = 24, HALF = 9, TOP = 22, MAX_ROWS = 24;

export class ComparePanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "compare", title: "Compare", hint: "a above and dark, b below and light", height: 200 });
    this.badge = h("span", { class: "wb-badge" });
    this.jump = h("button", { class: "wb-button", onclick: () => this.cursor.seek(this.findings.first_divergence.step - this.store.label(0)) }, "Go to the first divergence");
    this.words = h("p", { class: "wb-facts" });
    this.align = h("select", { class: "wb-button", "aria-label": "Align the two runs by", onchange: () => { this.stale.add("data"); this.view.requestFrame(); } },
      h("option", { value: "step" }, "aligned by step"), h("option", { value: "arrival" }, "aligned by arrival of the request"), h("option", { value: "time" }, "aligned by time"));
    this.rowsOf = h("select", { class: "wb-button", "aria-label": "Rows of the requests", onchange: () => { this.stale.add("data"); this.view.requestFrame(); } },
      h("option", { value: "chunks" }, "rows: chunks"), h("option", { value: "tokens" }, "rows: tokens"));
    this.rowsElement = h("tbody");
    this.gains = h("div", { class: "wb-scroll", tabindex: 0 }, h("table", { class: "wb-table" }, h("thead", {}, h("tr", {}, ["request", "TTFT a", "b", "Δ", "ITL a", "b", "Δ", "computed again a", "b", "Δ"].map((name) => h("th", { scope: "col" }, name)))), this.rowsElement));
    this.element.hidden = true;
    this.tools.append(this.align, this.rowsOf);
    this.body.prepend(h("div", { class: "wb-bar" }, this.badge, this.jump), this.words);
    this.body.append(this.gains);
  }

  get other() { return this.view.other; }
  get findings() { return this.other?.comparison; }

  needs(what) { return what !== "status"; }

  base(what) { return what !== "hover" && what !== "step"; }

  layout() {
    if (!this.other) return this.setHeight(1);
    const { findings } = this;
    if (findings.refused) {
      setText(this.badge, "cannot be compared");
      setText(this.words, findings.refused);
      this.jump.hidden = this.align.hidden = this.rowsOf.hidden = this.gains.hidden = true;
      return this.setHeight(1);
    }
    setText(this.badge, findings.badge);
    this.badge.dataset.state = findings.same_tokens ? "running" : findings.same_tokens === false ? "bad" : "";
    const parted = findings.first_divergence;
    this.jump.hidden = !parted;
    const where = parted ? `First divergence: step ${parted.step}, ${plain(parted.request)}: ${plain(parted.what, 160)}.` : "The schedules never differ.";
    const unit = findings.unit === "s" ? "" : "Times are in steps, because one of the runs has no clock.";
    setText(this.words, [where, unit, ...findings.notes.map((note) => plain(note, 240))].filter(Boolean).join(" "));
    this.rows = findings.rows.slice(0, MAX_ROWS).map(([id]) => [this.store.byId.get(id), this.other.byId.get(id)]);
    this.tokens = this.rowsOf.value === "tokens" ? new TokenLanes(this.rows, [this.store, this.other]) : null;
    const rows = this.tokens ? `bars: time since the token before, ${this.write(this.tokens.longest)} at the highest` : "cells: chunks";
    setText(this.hintElement, `a above and dark, b below and light; ${rows}; × the first different token`);
    this.setHeight(TOP + MIRROR + 22 + this.rows.length * ROW + 22);
    this.fillTable();
  }

  write(value) {
    if (value === null) return "–";
    return this.findings.unit === "s" ? formatSeconds(value) : formatNumber(value);
  }

  delta(a, b, write) {
    if (a === null || b === null) return "–";
    const change = b - a;
    return change === 0 ? "0" : `${change > 0 ? "+" : "−"}${write(Math.abs(change))}`;
  }

  fillTable() {
    const time = (v) => this.write(v), count = (v) => formatNumber(v);
    replace(this.rowsElement, this.findings.rows.map((row) => {
      const [id, ttftA, ttftB, itlA, itlB, wasteA, wasteB] = row;
      const cells = [time(ttftA), time(ttftB), this.delta(ttftA, ttftB, time), time(itlA), time(itlB), this.delta(itlA, itlB, time), count(wasteA), count(wasteB), this.delta(wasteA, wasteB, count)];
      return h("tr", { onclick: () => this.cursor.select(this.store.byId.get(id).index) }, h("td", {}, h("bdi", {}, plain(id))), cells.map((cell) => h("td", { class: "wb-number" }, cell)));
    }));
  }

  /** Pixels of a step of one run: function (store, step) for the chosen alignment, `origin` for the arrival of a request. */
  scale() {
    const x0 = MARGIN.left, x1 = this.width - 16, stores = [this.store, this.other];
    const timed = this.align.value === "time" && stores.every((store) => store.timed());
    const end = timed ? Math.max(...stores.map((store) => store.endTime.data[store.numSteps - 1])) : Math.max(...stores.map((store) => store.numSteps));
    this.end = end;
    this.timed = timed;
    return (store, step, origin = 0) => {
      const at = timed ? (step < store.numSteps ? store.value("time", step) : store.endTime.data[store.numSteps - 1]) : step;
      return x0 + ((at - origin) / end) * (x1 - x0);
    };
  }

  draw(context, width, height) {
    if (!this.other || this.findings.refused) return;
    this.x = this.scale();
    this.drawMirror(context);
    this.drawLanes(context);
  }

  drawMirror(context) {
    const { theme } = this, colours = theme.colours, stores = [this.store, this.other], middle = TOP + MIRROR / 2;
    const tokens = (store, step) => store.value("decode_tokens", step) + store.value("prefill_tokens", step);
    let most = 1;
    for (const store of stores) for (let step = 0; step < store.numSteps; step++) most = Math.max(most, tokens(store, step));
    stores.forEach((store, which) => {
      const sign = which ? 1 : -1, half = MIRROR / 2 - 4;
      context.fillStyle = which ? colours.decode : colours.prefill;
      for (let step = 0; step < store.numSteps; step++) {
        const x = this.x(store, step), w = Math.max(0.6, this.x(store, step + 1) - x - 0.5), high = (tokens(store, step) / most) * half;
        context.fillRect(x, which ? middle + 4 : middle - 4 - high, w, high);
      }
      text(context, `${which ? "b" : "a"}: ${formatNumber(store.numSteps)} steps`, MARGIN.left - 8, middle + sign * half * 0.6, colours.muted, { align: "right", font: SMALL });
    });
    // The strip between them is marked where the two runs schedule different numbers of tokens in the same step.
    const steps = Math.min(this.store.numSteps, this.other.numSteps);
    for (let step = 0; step < steps && !this.timed; step++) {
      const difference = tokens(this.other, step) - tokens(this.store, step);
      if (!difference) continue;
      context.fillStyle = colours.cursor;
      context.fillRect(this.x(this.store, step), difference > 0 ? middle : middle - 3, Math.max(0.8, this.x(this.store, step + 1) - this.x(this.store, step)), 3);
    }
    text(context, "tokens per step; the strip marks steps with more in b (below) or in a (above)", MARGIN.left, 9, colours.muted, { font: SMALL });
    for (const tick of ticks(0, this.end, 8, !this.timed)) {
      text(context, this.timed ? formatSeconds(tick) : formatNumber(tick), MARGIN.left + (tick / this.end) * (this.width - 16 - MARGIN.left), TOP + MIRROR + 8, colours.muted, { font: SMALL });
    }
  }

  /** Index of the first token of a request in which the runs differ, "none" when they do not. */
  difference(id) {
    const found = firstDifference(this.store.byId.get(id).tokens, this.other.byId.get(id).tokens);
    return found < 0 ? "none" : found;
  }

  /** Middle of a request's row: its first run is above, its second below. */
  middle(row) { return TOP + MIRROR + 22 + row * ROW + ROW / 2 - 2; }

  drawLanes(context) {
    const { theme, tokens } = this, colours = theme.colours;
    if (tokens) tokens.drawAxis(context, this.width, this.middle(this.rows.length) - 2, colours);
    this.rows.forEach(([a, b], row) => {
      const middle = this.middle(row);
      requestLabel(context, plain(a.id, 10), MARGIN.left - 8, middle, colours.text, theme.hue(a.index));
      if (tokens) tokens.drawLane(context, row, this.width, middle, HALF, theme);
      else this.drawChunks(context, a, b, middle);
      context.fillStyle = colours.hairline;
      context.fillRect(MARGIN.left, middle + ROW / 2, this.width - 16 - MARGIN.left, 1);
    });
  }

  drawChunks(context, a, b, middle) {
    const { theme } = this, colours = theme.colours, difference = firstDifference(a.tokens, b.tokens);
    [[this.store, a], [this.other, b]].forEach(([store, request], which) => {
      const origin = this.align.value === "arrival" ? request.arrival_step : 0;
      for (let i = 0; i < request.chunks.length; i++) {
        const chunk = store.chunk(request.chunks[i]), step = request.chunkSteps[i], high = chunk.decode ? 4 : 8;
        const x = this.x(store, step, origin), w = Math.max(0.8, this.x(store, step + 1, origin) - x), top = which ? middle + 0.5 : middle - 0.5 - high;
        context.fillStyle = chunk.decode ? theme.decode(a.index) : theme.prefill(a.index);
        context.fillRect(x, top, w, high);
        if (chunk.recomputed) hatch(context, x, top, w, high, colours.background, 3);
      }
      const token = request.tokens[difference];
      if (token) markDifference(context, this.x(store, token.step, origin), which ? middle + HALF / 2 : middle - HALF / 2, HALF / 2, colours.bad);
    });
  }

  showsOverlay() { return true; }

  drawOverlay(context, width, height) {
    if (!this.other || this.findings.refused || !this.x || this.align.value === "arrival") return;
    const bottom = this.tokens ? TOP + MIRROR : height;
    context.fillStyle = this.theme.colours.cursor;
    context.fillRect(this.x(this.store, this.cursor.step) - 0.75, TOP - 4, 1.5, bottom - TOP);
  }

  hit(x, y) {
    if (!this.other || this.findings.refused || !this.rows) return null;
    const row = Math.round((y - this.middle(0)) / ROW), pair = y > TOP + MIRROR + 18 ? this.rows[row] : null;
    if (!pair) {
      if (this.timed || x < MARGIN.left || y > TOP + MIRROR) return null;
      const step = Math.floor(((x - MARGIN.left) / (this.width - 16 - MARGIN.left)) * this.end);
      return step < this.store.numSteps ? { step, hover: { step }, lines: [`step ${this.store.label(step)}`] } : null;
    }
    const [a, b] = pair, hover = { request: a.index };
    const token = this.tokens && x >= MARGIN.left ? this.tokens.describe(row, this.tokens.at(x, this.width), writeLatency(this.store.timed())) : null;
    if (token) return { hover, request: a, ...token };
    const difference = firstDifference(a.tokens, b.tokens);
    const last = (request) => `${request.tokens.length} tokens, last chunk in step ${request.chunkSteps.at(-1) ?? "–"}`;
    return { hover, request: a, lines: [plain(a.id), `a: ${last(a)}`, `b: ${last(b)}`, difference < 0 ? "the same tokens" : `the first difference is token ${difference}`] };
  }

  clicked(hit) {
    if (hit.step !== undefined) this.cursor.seek(hit.step);
    else this.cursor.select(hit.request.index);
  }

  describe() { return this.findings ? this.findings.refused || this.findings.badge : ""; }

  tableTwin() {
    return {
      caption: this.findings?.badge, headings: ["request", "TTFT a", "TTFT b", "ITL a", "ITL b", "recomputed a", "recomputed b", "first different token"],
      rows: (this.findings?.rows || []).map(([id, ...values]) => [plain(id), ...values.map((v, i) => (i < 4 ? this.write(v) : v)), this.difference(id)]),
    };
  }
}

// Chunks of every request over the steps, and how far its KV has come.

import { formatNumber, h, plain } from "./dom.js";
import { SMALL, dashes, eventMark, hatch, requestLabel, text, textWidth } from "./drawing.js";
import { StepAxis } from "./step_axis.js";
import { StepPanel } from "./step_panel.js";
import { upperBound } from "./store.js";

const ROW = 16, TOP = 18, BOTTOM = 4, MAX_ROWS = 14;

export class GanttPanel extends StepPanel {
  constructor(view) {
    super(view, { id: "gantt", title: "Chunks", hint: "one row per request, one cell per chunk", height: TOP + ROW * 4 + BOTTOM });
    this.top = TOP - 2;
    this.rowMark = h("div", { class: "wb-row-mark", hidden: true });
    this.holder.append(this.rowMark);
    this.offset = 0;
    this.activeFirst = false;
    this.sort = h("button", { class: "wb-quiet", "aria-pressed": "false", title: "Show the requests that are scheduled at the cursor first", onclick: () => {
      this.activeFirst = !this.activeFirst;
      this.sort.setAttribute("aria-pressed", String(this.activeFirst));
      this.stale.add("data");
      this.view.requestFrame();
    } }, "Scheduled first");
    this.tools.append(this.sort);
    this.canvas.addEventListener("wheel", (event) => {
      const most = Math.max(0, this.rows.length - MAX_ROWS);
      const next = Math.max(0, Math.min(most, this.offset + Math.sign(event.deltaY) * 2));
      if (next === this.offset) return;
      event.preventDefault();
      this.offset = next;
      this.touched = true;
      this.stale.add("data");
      this.view.requestFrame();
    }, { passive: false });
    this.rows = [];
  }

  base(what) {
    if (what !== "step") return what !== "hover";
    if (this.activeFirst) return true;
    return this.firstRow() !== this.offset;
  }

  layout() {
    const { store, cursor } = this, filter = cursor.filter.toLowerCase();
    this.rows = store.requests.filter((request) => !filter || request.id.toLowerCase().includes(filter));
    const here = (request) => {
      const last = store.lastChunk(request, cursor.step);
      return last >= 0 && request.chunkSteps[last] === cursor.step;
    };
    if (this.activeFirst) this.rows = [...this.rows.filter(here), ...this.rows.filter((request) => !here(request))];
    const shown = Math.min(MAX_ROWS, Math.max(1, this.rows.length));
    this.setHeight(TOP + ROW * shown + BOTTOM);
    this.offset = this.firstRow();
    this.mostTokens = 1;
    for (const request of this.rows) this.mostTokens = Math.max(this.mostTokens, this.total(request));
  }

  /** The row to begin with: that before the first request unfinished at the cursor, until a person scrolls. */
  firstRow() {
    const { store, cursor } = this, most = Math.max(0, this.rows.length - MAX_ROWS);
    if (!most || this.touched || this.activeFirst) return Math.min(this.offset, most);
    const first = this.rows.findIndex((request) => !["finished", "aborted"].includes(store.stateOf(request, cursor.step)));
    return Math.min(Math.max(0, first - 1), most);
  }

  shown() {
    return this.rows.slice(this.offset, this.offset + MAX_ROWS);
  }

  y(row) {
    return TOP + row * ROW;
  }

  /** The rows that are drawn, and the requests in focus. */
  scale() {
    return [this.offset, this.rows.length, this.shown().map((request) => request.index), [...this.theme.focus]];
  }

  draw(context, axis, from) {
    const { height } = this, colours = this.theme.colours;
    this.drawLegend(context, axis);
    this.shown().forEach((request, row) => {
      const y = this.y(row);
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, y + ROW - 1, axis.x1 - axis.x0, 1);
      this.drawLabel(context, request, axis.x0, y);
      this.drawRow(context, axis, request, y, from);
    });
    if (this.rows.length > MAX_ROWS) {
      const track = height - TOP - BOTTOM, share = MAX_ROWS / this.rows.length;
      context.fillStyle = colours.decode;
      context.fillRect(axis.x1 + 2, TOP + (this.offset / this.rows.length) * track, 3, share * track);
    }
  }

  drawLabel(context, request, x, y) {
    const { theme } = this, hue = theme.hue(request.index);
    requestLabel(context, plain(request.id, 10), x - 8, y + ROW / 2 - 1, theme.colours.text, hue);
  }

  drawRow(context, axis, request, y, from) {
    const { store, theme } = this, colours = theme.colours;
    const top = y + 2, high = ROW - 5, middle = y + ROW / 2 - 0.5;
    this.drawWaiting(context, axis, request, middle);
    const solid = theme.prefill(request.index), light = theme.decode(request.index);
    const first = upperBound(request.chunkSteps, from - 1), dense = axis.stepWidth < 5 && !axis.byTime;
    const flags = store.columns.get("chunk.flags").data;
    let runStart = -1, runEnd = -1;
    const flush = () => {
      if (runStart < 0) return;
      context.fillStyle = light;
      context.fillRect(axis.x(runStart), top + 2, Math.max(1, axis.end(runEnd) - axis.x(runStart)), high - 4);
      runStart = -1;
    };
    for (let i = first; i < request.chunks.length && request.chunkSteps[i] < axis.last; i++) {
      const step = request.chunkSteps[i];
      if (dense && (flags[request.chunks[i]] & 3) === 0) {
        // Too narrow for single cells: one light bar per unbroken run of decodes.
        if (runStart >= 0 && step !== runEnd + 1) flush();
        if (runStart < 0) runStart = step;
        runEnd = step;
        continue;
      }
      flush();
      const chunk = store.chunk(request.chunks[i]);
      const x = axis.x(step), w = Math.max(1, axis.end(step) - x - (axis.stepWidth > 4 ? 1 : 0));
      if (chunk.decode) {
        context.fillStyle = light;
        context.fillRect(x, top + 2, w, high - 4);
        context.fillStyle = colours.outline;
        context.beginPath();
        context.arc(x + w / 2, middle, Math.min(1.6, w / 3), 0, 7);
        context.fill();
      } else {
        context.fillStyle = solid;
        context.fillRect(x, top, w, high);
        if (chunk.recomputed) hatch(context, x, top, (w * chunk.recomputed) / chunk.n, high, colours.background, 4);
        const label = String(chunk.n);
        if (w >= textWidth(context, label, SMALL) + 4) text(context, label, x + w / 2, middle + 0.5, this.view.ink(solid), { align: "center", font: SMALL });
      }
    }
    flush();
    for (const change of request.changes) {
      if (change.step < from || change.step >= axis.last) continue;
      if (change.state === "preempted") eventMark(context, theme, "preempt", axis.x(change.step) + Math.min(6, axis.stepWidth / 2), middle, 4);
      if (change.state === "finished") eventMark(context, theme, "finish", axis.end(change.step) + 4, middle, 2.5);
      if (change.state === "aborted") eventMark(context, theme, "abort", axis.x(change.step) + 3, middle, 3);
    }
  }

  /** A thin line where the request exists but is not scheduled: grey while it waits, dashed after a preemption. */
  drawWaiting(context, axis, request, y) {
    const { store, theme } = this;
    request.changes.forEach((change, i) => {
      if (change.state !== "waiting" && change.state !== "preempted") return;
      const until = i + 1 < request.changes.length ? request.changes[i + 1].step : store.numSteps;
      const from = Math.max(change.step, axis.first), to = Math.min(until, axis.last);
      if (to <= from) return;
      const x = axis.x(from), width = (to < store.numSteps ? axis.x(to) : axis.end(to - 1)) - x;
      if (change.state === "preempted") return dashes(context, x, y - 0.5, width, theme.colours.muted, 3, 2);
      context.fillStyle = theme.colours.muted;
      context.fillRect(x, y - 0.5, width, 1);
    });
  }

  drawLegend(context, axis) {
    const { theme } = this, colours = theme.colours;
    const entries = [
      ["prefill chunk", (x) => { context.fillStyle = colours.prefill; context.fillRect(x, 4, 14, 9); }, 86],
      ["decode", (x) => { context.fillStyle = colours.decode; context.fillRect(x, 6, 14, 5); context.fillStyle = colours.outline; context.beginPath(); context.arc(x + 7, 8.5, 1.6, 0, 7); context.fill(); }, 60],
      ["recomputed", (x) => { context.fillStyle = colours.prefill; context.fillRect(x, 4, 14, 9); hatch(context, x, 4, 14, 9, colours.background, 4); }, 80],
      ["waiting", (x) => { context.fillStyle = colours.muted; context.fillRect(x, 8, 14, 1); }, 62],
      ["preempted", (x) => eventMark(context, theme, "preempt", x + 7, 8.5, 4), 72],
      ["finished", (x) => eventMark(context, theme, "finish", x + 7, 8.5, 2.5), 60],
    ];
    let x = axis.x0;
    for (const [label, mark, wide] of entries) {
      if (x + wide > axis.x1) break;
      mark(x);
      text(context, label, x + 19, 9, colours.muted, { font: SMALL });
      x += wide + 18;
    }
    text(context, "KV computed", axis.x1 + 16, 9, colours.muted, { font: SMALL });
  }

  showsOverlay() { return true; }

  cursorBottom() { return this.height - BOTTOM; }

  placeCursor() {
    super.placeCursor();
    const { cursor, rowMark } = this, row = this.shown().findIndex((request) => request.index === cursor.hover.request);
    rowMark.hidden = row < 0;
    if (row < 0) return;
    const colour = this.theme.hue(cursor.hover.request) || this.theme.colours.muted;
    rowMark.style.cssText = `transform:translateY(${this.y(row)}px);height:${ROW - 1}px;border-color:${colour}`;
  }

  drawOverlay(context, width) {
    const { store, cursor, theme } = this, colours = theme.colours;
    const axis = new StepAxis(store, cursor, width);
    const x = axis.x1 + 16, full = 92;
    this.shown().forEach((request, row) => {
      const y = this.y(row) + 3, high = ROW - 8;
      const last = store.lastChunk(request, cursor.step);
      const scale = full / this.mostTokens, total = this.total(request) * scale;
      if (last >= 0 && store.stateOf(request, cursor.step) !== "preempted") {
        const chunk = store.chunk(request.chunks[last]);
        const now = request.chunkSteps[last] === cursor.step;
        const hit = this.cachedTokens(request, last);
        context.fillStyle = theme.prefill(request.index);
        context.fillRect(x, y, chunk.end * scale, high);
        context.fillStyle = colours.kv;
        context.fillRect(x, y, hit * scale, high);
        if (now) hatch(context, x + chunk.start * scale, y, Math.max(2, chunk.n * scale), high, colours.background, 3);
        text(context, formatNumber(chunk.end), x + full + 6, y + high / 2, colours.muted, { font: SMALL });
      }
      context.strokeStyle = colours.decode;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, total - 1, high - 1);
    });
  }

  total(request) {
    const { columns } = this.store, last = request.chunks.at(-1);
    const end = last === undefined ? 0 : columns.get("chunk.start").data[last] + columns.get("chunk.num_tokens").data[last];
    return Math.max(request.num_prompt_tokens, end);
  }

  /** Tokens found in the prefix cache at the admission that is in force at chunk `last`. */
  cachedTokens(request, last) {
    for (let i = last; i >= 0; i--) {
      const cached = this.store.columns.get("chunk.num_cached").data[request.chunks[i]];
      if (cached) return cached;
      if (this.store.columns.get("chunk.start").data[request.chunks[i]] === 0) return 0;
    }
    return 0;
  }

  hit(x, y) {
    const request = this.shown()[Math.floor((y - TOP) / ROW)];
    if (!request || y < TOP) return null;
    const { store } = this;
    const step = new StepAxis(store, this.cursor, this.width).stepAt(x);
    const lines = [plain(request.id)];
    const hover = { request: request.index };
    if (step < 0) {
      lines.push(`prompt ${formatNumber(request.num_prompt_tokens)} tokens, at most ${formatNumber(request.max_tokens)} more`);
      return { hover, lines, request };
    }
    const last = store.lastChunk(request, step);
    hover.step = step;
    if (last >= 0 && request.chunkSteps[last] === step) {
      const chunk = store.chunk(request.chunks[last]);
      hover.chunk = chunk.index;
      lines.push(`step ${store.label(step)}: ${chunk.decode ? "decode" : "prefill"}, ${formatNumber(chunk.n)} token${chunk.n > 1 ? "s" : ""}, KV ${formatNumber(chunk.start)} → ${formatNumber(chunk.end)}`);
      lines.push(chunk.limitedBy === "complete" ? "all of its known tokens" : `limited by ${chunk.limitedBy.replaceAll("_", " ")}`);
      if (chunk.cached) lines.push(`${formatNumber(chunk.cached)} tokens found in the prefix cache`);
      if (chunk.recomputed) lines.push(`${formatNumber(chunk.recomputed)} tokens recomputed after a preemption`);
    } else {
      const state = store.stateOf(request, step);
      lines.push(`step ${store.label(step)}: ${state || "not here yet"}`);
      if (state === "waiting" || state === "preempted") lines.push(plain(store.whyNot(request, step), 90));
    }
    return { hover, lines, step, request };
  }

  clicked(hit, event) {
    if (hit.step === undefined || event.altKey) this.view.toggleFocus(hit.request);
    else super.clicked(hit);
  }

  describe() {
    return `${this.rows.length} requests`;
  }

  tableTwin() {
    const { store, cursor } = this;
    this.layout();
    return {
      caption: `Requests at step ${store.label(cursor.step)}`, headings: ["request", "state", "chunk", "KV before", "KV after", "prompt", "why"],
      rows: this.rows.map((request) => {
        const last = store.lastChunk(request, cursor.step), state = store.stateOf(request, cursor.step);
        const chunk = last >= 0 && request.chunkSteps[last] === cursor.step ? store.chunk(request.chunks[last]) : null;
        const why = chunk ? chunk.limitedBy : state === "waiting" || state === "preempted" ? store.whyNot(request, cursor.step) : request.finishReason;
        return { request, cells: [plain(request.id), state, chunk ? `${chunk.n} ${chunk.decode ? "decode" : "prefill"}` : "–", chunk ? chunk.start : "–", chunk ? chunk.end : "–", request.num_prompt_tokens, plain(why || "", 90)] };
      }),
    };
  }
}

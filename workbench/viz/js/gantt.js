// Chunks of every request over the steps, and at the right its computed KV.

import { counted, formatNumber, h, plain } from "./dom.js";
import { dot, draftCells, eventMark, requestLabel, SMALL, text } from "./drawing.js";
import { drawRow, ROW } from "./gantt_row.js";
import { box, hatched, layers, LegendLines, legendRow } from "./legend.js";
import { isOver, nameOf } from "./request.js";
import { hasRoomAtRight } from "./step_axis.js";
import { StepPanel } from "./step_panel.js";
import { draftsOf, kvOf, limitOf } from "./words.js";

const TOP = 18, BOTTOM = 4, MAX_ROWS = 14;

/** Width of a bar at the right of the axis that stands for the longest request. */
/** Pixels between two entries of the legend. */
const LEGEND_GAP = 18;

const KV_WIDTH = 92;

/**
 * A request at a step: its `state`, the `chunk` that was scheduled, and why there was none, or no longer one; of its KV
 * how much is `computed` after the step (-1: nothing is kept), how much of that the prefix cache had (`cached`), and
 * the most that there will be (`total`). The picture, the hover and the table all show this.
 */
function requestAt(store, step, request) {
  const state = store.stateOf(request, step),
    chunk = store.chunkIn(request, step),
    last = store.lastChunk(request, step);
  const isKept = (last >= 0 || request.computedBefore > 0) && store.holdsKv(request, step);
  const waits = state === "waiting" || state === "preempted";
  return {
    request,
    state,
    chunk,
    computed: isKept ? store.numComputed(request, step) : -1,
    cached: isKept ? cachedTokens(store, request, last) : 0,
    total: totalOf(store, request),
    why: chunk ? limitOf(chunk) : waits ? store.whyNot(request, step) : isOver(state) ? store.finishWords(request) : "",
  };
}

/** Number of known tokens of a request, at least those of its prompt. */
function totalOf(store, request) {
  const last = request.chunks.at(-1);
  const end = last === undefined ? 0 : store.column("chunk.start")[last] + store.column("chunk.num_tokens")[last];
  return Math.max(request.num_prompt_tokens, end);
}

/** Tokens found in the prefix cache by the admission before chunk number `last`. */
function cachedTokens(store, request, last) {
  const cached = store.column("chunk.num_cached"), start = store.column("chunk.start");
  for (let i = last; i >= 0; i--) {
    const chunk = request.chunks[i];
    if (cached[chunk]) return cached[chunk];
    if (start[chunk] === 0) return 0;
  }
  return 0;
}

export class GanttPanel extends StepPanel {
  constructor(view) {
    super(view, {
      id: "gantt",
      title: "Chunks",
      hint: "one row per request, one cell per chunk",
      height: TOP + ROW * 4 + BOTTOM,
    });
    this.top = TOP - 2;
    this.rows = [];
    this.offset = 0;
    this.scrolled = false;
    this.activeFirst = false;
    this.legend = new LegendLines();
    this.holder.before(this.legend.element);
    this.rowMark = h("div", { class: "wb-row-mark", hidden: true });
    this.holder.append(this.rowMark);
    const title = "List requests scheduled at the cursor first";
    const props = { class: "wb-quiet", "aria-pressed": "false", title };
    this.sort = h("button", { ...props, onclick: () => this.toggleSort() }, "Scheduled first");
    this.tools.append(this.sort);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  toggleSort() {
    this.activeFirst = !this.activeFirst;
    this.sort.setAttribute("aria-pressed", String(this.activeFirst));
    this.redraw();
  }

  /** Scroll through the rows; at either end the page scrolls. */
  wheel(event) {
    const most = Math.max(0, this.rows.length - MAX_ROWS);
    const next = Math.max(0, Math.min(most, this.offset + Math.sign(event.deltaY) * 2));
    if (next === this.offset) return;
    event.preventDefault();
    this.offset = next;
    this.scrolled = true;
    this.redraw();
  }

  changesPicture(what) {
    if (what !== "step") return what !== "hover";
    return this.activeFirst || this.firstRow() !== this.offset;
  }

  layout() {
    const { store, cursor } = this;
    this.rows = store.requests.filter((request) => cursor.matches(request));
    if (this.activeFirst) {
      const [scheduled, others] = [[], []];
      for (const request of this.rows) (store.chunkIn(request, cursor.step) ? scheduled : others).push(request);
      this.rows = [...scheduled, ...others];
    }
    const shown = Math.min(MAX_ROWS, Math.max(1, this.rows.length));
    this.setHeight(TOP + ROW * shown + BOTTOM);
    this.offset = this.firstRow();
    this.mostTokens = 1;
    for (const request of this.rows) this.mostTokens = Math.max(this.mostTokens, totalOf(store, request));
  }

  /** The first visible row: the one before the first request unfinished at the cursor, until a person scrolls. */
  firstRow() {
    const { store, cursor } = this, most = Math.max(0, this.rows.length - MAX_ROWS);
    if (!most || this.scrolled || this.activeFirst) return Math.min(this.offset, most);
    const first = this.rows.findIndex((request) => !isOver(store.stateOf(request, cursor.step)));
    return Math.min(Math.max(0, first - 1), most);
  }

  shown() {
    return this.rows.slice(this.offset, this.offset + MAX_ROWS);
  }

  y(row) {
    return TOP + row * ROW;
  }

  /** The visible rows, and their hues. */
  scale() {
    const hues = this.shown().map(({ index }) => [index, this.theme.hue(index)]);
    return [this.offset, this.rows.length, hues];
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(context, axis, from) {
    const { theme, height } = this, { colours } = theme;
    this.drawLegend(context, axis);
    this.shown().forEach((request, row) => {
      const y = this.y(row);
      context.fillStyle = colours.hairline;
      context.fillRect(axis.x0, y + ROW - 1, axis.x1 - axis.x0, 1);
      requestLabel(context, theme, request, axis.x0 - 8, y + ROW / 2 - 1);
      axis.clipped(context, height, () => drawRow(context, this, axis, request, y, from));
    });
    if (this.rows.length > MAX_ROWS) {
      const track = height - TOP - BOTTOM, share = MAX_ROWS / this.rows.length;
      context.fillStyle = colours.decode;
      context.fillRect(axis.x1 + 2, TOP + (this.offset / this.rows.length) * track, 3, share * track);
    }
  }

  drawLegend(context, axis) {
    const { theme } = this, { colours } = theme;
    const decodeDot = (context, x) => {
      context.fillStyle = colours.outline;
      dot(context, x + 7, 0, 1.6);
    };
    const event = (kind, size) => (context, x) => eventMark(context, theme, kind, x + 7, 0, size);
    const recomputed = layers(box(colours.prefill, 14, 9), hatched(colours.background, 14, 9));
    const entries = [
      { name: "prefill chunk", mark: box(colours.prefill, 14, 9), width: 86 },
      { name: "decode", mark: layers(box(colours.decode, 14, 5), decodeDot), width: 60 },
      { name: "recomputed", mark: recomputed, width: 80 },
      { name: "waiting", mark: box(colours.muted, 14, 1), width: 62 },
      { name: "preempted", mark: event("preempt", 4), width: 72 },
      { name: "finished", mark: event("finish", 2.5), width: 60 },
      ...(this.store.hasAborts ? [{ name: "aborted", mark: event("abort", 3), width: 60 }] : []),
    ];
    if (this.store.hasDrafts) {
      const chunk = (accepted) => ({ n: 1, drafts: 1, accepted });
      const draft = (accepted) => (context, x) => {
        draftCells(context, x + 2, -4.5, 9, 9, chunk(accepted), colours.outline);
      };
      entries.splice(
        2,
        0,
        { name: "draft accepted", mark: draft(1), width: 86 },
        { name: "rejected", mark: draft(0), width: 62 },
      );
    }
    const wide = entries.reduce((sum, { width }) => sum + width, LEGEND_GAP * (entries.length - 1));
    const room = hasRoomAtRight(this.width) && axis.x0 + wide <= axis.x1;
    this.legend.show(room ? [] : entries, this.width, colours.muted);
    if (room) legendRow(context, entries, axis.x0, axis.x1, 8.5, LEGEND_GAP, colours.muted);
    if (hasRoomAtRight(this.width)) text(context, "computed KV", axis.x1 + 16, 9, colours.muted, SMALL);
  }

  showsOverlay() {
    return true;
  }

  cursorBottom() {
    return this.height - BOTTOM;
  }

  placeCursor() {
    super.placeCursor();
    const { theme, rowMark } = this, { request: hovered } = this.cursor.hover;
    const row = this.shown().findIndex((request) => request.index === hovered);
    rowMark.hidden = row < 0;
    if (row < 0) return;
    const colour = theme.hue(hovered) || theme.colours.muted;
    rowMark.style.cssText = `transform:translateY(${this.y(row)}px);height:${ROW - 1}px;border-color:${colour}`;
  }

  /** At the right of the axis: the KV of each request after the step at the cursor. */
  drawOverlay(context) {
    const { store, cursor, theme } = this, { colours } = theme;
    if (!hasRoomAtRight(this.width)) return;
    const x = this.axis().x1 + 16, scale = KV_WIDTH / this.mostTokens;
    this.shown().forEach((request, row) => {
      const { chunk, computed, cached, total } = requestAt(store, cursor.step, request);
      const y = this.y(row) + 3, height = ROW - 8;
      if (computed >= 0) {
        context.fillStyle = theme.prefill(request.index);
        context.fillRect(x, y, computed * scale, height);
        context.fillStyle = colours.kv;
        context.fillRect(x, y, cached * scale, height);
        text(context, formatNumber(computed), x + KV_WIDTH + 6, y + height / 2, colours.muted, SMALL);
      }
      context.strokeStyle = colours.decode;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, total * scale - 1, height - 1);
      if (computed >= 0 && chunk) { // framed, as the pool's blocks of this step are
        context.strokeStyle = colours.outline;
        context.strokeRect(x + chunk.start * scale + 0.5, y + 0.5, Math.max(2, chunk.n * scale) - 1, height - 1);
      }
    });
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x, y) {
    const request = this.shown()[Math.floor((y - TOP) / ROW)];
    if (!request || y < TOP) return null;
    const step = this.axis().stepAt(x), lines = [nameOf(request)];
    if (step < 0) {
      const prompt = counted(request.num_prompt_tokens, "prompt token");
      lines.push(`${prompt}, up to ${counted(request.max_tokens, "output token")}`);
      const { computed, cached } = requestAt(this.store, this.cursor.step, request);
      const hit = cached ? `, of which the prefix cache had ${formatNumber(cached)}` : "";
      if (computed >= 0) lines.push(`computed KV: ${counted(computed, "token")}${hit}`);
      return { hover: { request: request.index }, lines, request };
    }
    const at = requestAt(this.store, step, request), { chunk } = at;
    lines.push(...(chunk ? this.chunkLines(chunk, step) : this.stateLines(at, step)));
    const hover = { request: request.index, step, ...(chunk && { chunk: chunk.index }) };
    return { hover, lines, step, request };
  }

  chunkLines(chunk, step) {
    const kind = chunk.decode ? "decode" : "prefill", tokens = counted(chunk.n, "token");
    const lines = [`step ${this.store.label(step)}: ${kind}, ${tokens}, ${kvOf(chunk)}`, limitOf(chunk)];
    if (chunk.drafts) lines.push(draftsOf(chunk));
    if (chunk.cached) lines.push(`prefix cache hit: ${counted(chunk.cached, "token")}`);
    if (chunk.miss) lines.push(plain(chunk.miss, 120));
    if (chunk.recomputed) lines.push(`${counted(chunk.recomputed, "token")} recomputed after a preemption`);
    return lines;
  }

  stateLines({ state, why }, step) {
    const lines = [`step ${this.store.label(step)}: ${state || "not arrived yet"}`];
    if (state === "waiting" || state === "preempted") lines.push(plain(why, 90));
    return lines;
  }

  clicked(hit, event) {
    if (event.altKey) return this.view.toggleFocus(hit.request);
    if (hit.step !== undefined) super.clicked(hit, event);
    this.view.inspector.pin({ kind: "request", request: hit.request.index });
  }

  describe() {
    return counted(this.rows.length, "request");
  }

  tableData() {
    this.layout();
    const { store, cursor } = this;
    return {
      caption: `Requests at step ${store.label(cursor.step)}`,
      headings: ["request", "state", "chunk", "KV before", "KV after", "computed KV", "cached", "prompt", "why"],
      rows: this.rows.map((request) => ({ request, cells: this.cells(requestAt(store, cursor.step, request)) })),
    };
  }

  cells({ request, state, chunk, computed, cached, why }) {
    return [
      nameOf(request),
      state,
      ...(chunk ? [`${chunk.n} ${chunk.decode ? "decode" : "prefill"}`, chunk.start, chunk.end] : ["–", "–", "–"]),
      computed < 0 ? "–" : computed,
      cached,
      request.num_prompt_tokens,
      plain(why, 90),
    ];
  }
}

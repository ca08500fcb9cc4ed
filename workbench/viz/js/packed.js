// The packed batch: the query rows of all sequences one after another, and each sequence against its KV.

import { counted, formatNumber, formatRange } from "./dom.js";
import {
  BOLD,
  breakMark,
  dot,
  draftCells,
  hatch,
  MONO,
  polygon,
  requestLabel,
  SMALL,
  text,
  textWidth,
  tickLabels,
  ticksIn,
} from "./drawing.js";
import { firstSeen, readableScale } from "./geometry.js";
import { box, hatched, legendRow } from "./legend.js";
import { CanvasPanel } from "./panel.js";
import { nameOf } from "./request.js";
import { inkOn, mix } from "./theme.js";
import { draftsOf, kvOf, limitOf, roleOf } from "./words.js";

const LEFT = 84, RIGHT = 16;

/** Two ribbons of query rows, one to scale and one readable, and below them a row for each sequence. */
const RIBBON = 20, TRUE_Y = 14, READABLE_Y = 62, ROWS_Y = 128;

/** Share of the width for the labels of the rows; with less room they say less, and the shortest may take more. */
const LABELS = 0.45, SHORTEST = 0.6;

export class PackedPanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "packed",
      title: "Packed batch",
      hint: "one forward pass: all query rows side by side, each sequence against its own KV",
      height: 260,
    });
  }

  layout() {
    const { store, cursor } = this;
    this.chunks = store.numSteps ? store.chunks(cursor.step) : [];
    this.total = this.chunks.length ? this.chunks.at(-1).q1 : 0;
    this.budget = store.numSteps ? store.value("token_budget", cursor.step) : 0;
    this.blockSize = store.facts.block_size;
    this.window = store.numSteps ? store.window(cursor.step) : 0;
    this.nameGroup();
    this.row = this.chunks.length <= 16 ? 20 : Math.max(7, Math.min(20, 320 / this.chunks.length));
    this.setHeight(ROWS_Y + Math.max(3, this.chunks.length) * this.row + 22);
    const space = this.width - LEFT - RIGHT, labels = this.layoutLabels(space);
    this.trueScale = (q) => LEFT + (q / Math.max(this.budget, this.total, 1)) * space;
    this.readable = readableScale(this.chunks.map((chunk) => chunk.n), space, 22);
    this.kvMost = Math.max(16, ...this.chunks.map((chunk) => chunk.end));
    this.kvScale = (kv) => LEFT + (kv / this.kvMost) * (space - labels);
  }

  /** Choose labels that leave the bars room; returns the width they take. */
  layoutLabels(space) {
    const context = this.canvas.getContext("2d");
    const parts = this.chunks.map((chunk) => {
      const drafts = chunk.drafts ? [`${chunk.accepted}/${chunk.drafts} drafts`] : [];
      return [`q${formatRange(chunk.q0, chunk.q1)}`, counted(chunk.n, "row"), kvOf(chunk), ...drafts];
    });
    for (const first of [0, 1, 2, 3]) {
      this.labels = parts.map((words) => words.slice(first).join("  "));
      const width = 10 + Math.max(0, ...this.labels.map((label) => textWidth(context, label, MONO)));
      if (width <= space * (first < 2 ? LABELS : SHORTEST) || first === 3) return width;
    }
  }

  draw(context, width) {
    if (this.chunks.length) {
      this.drawTrueRibbon(context, width);
      this.drawReadableRibbon(context);
      this.drawRows(context, width);
    } else {
      const why = this.store.numSteps ? "Nothing was scheduled in this step." : "No steps yet.";
      text(context, why, LEFT, 40, this.theme.colours.muted);
    }
  }

  // -- the query rows --------------------------------------------------------------------------------------------

  drawTrueRibbon(context, width) {
    const { theme, chunks, total, budget } = this, { colours } = theme, middle = TRUE_Y + RIBBON / 2;
    text(context, "query rows", LEFT - 8, middle - 6, colours.muted, SMALL, "right");
    text(context, "to scale", LEFT - 8, middle + 6, colours.muted, SMALL, "right");
    for (const chunk of chunks) {
      const x = this.trueScale(chunk.q0), w = this.trueScale(chunk.q1) - x;
      context.fillStyle = theme.fill(chunk);
      context.fillRect(x, TRUE_Y, Math.max(0.5, w - (w > 6 ? 1 : 0)), RIBBON);
    }
    const end = this.trueScale(total), right = width - RIGHT;
    if (budget > total) {
      hatch(context, end, TRUE_Y, right - end, RIBBON, colours.hairline);
      const label = `${formatNumber(budget - total)} of ${formatNumber(budget)} unused`;
      const fits = right - end > textWidth(context, label, SMALL) + 12;
      if (fits) text(context, label, end + 6, middle, colours.muted, SMALL);
    }
    context.strokeStyle = colours.hairline;
    context.strokeRect(LEFT - 0.5, TRUE_Y - 0.5, right - LEFT, RIBBON + 1);
    const values = ticksIn(context, Math.max(budget, total), right - LEFT, 8);
    tickLabels(context, values, this.trueScale, TRUE_Y + RIBBON + 9, colours.muted);
  }

  drawReadableRibbon(context) {
    const { chunks } = this, { colours } = this.theme, bottom = READABLE_Y + RIBBON;
    text(context, "readable", LEFT - 8, READABLE_Y + RIBBON / 2, colours.muted, SMALL, "right");
    text(context, "cu_seqlens_q", LEFT - 8, bottom + 10, colours.muted, MONO, "right");
    let lastLabel = -Infinity;
    const tick = (value, x) => {
      context.fillStyle = colours.muted;
      context.fillRect(x, bottom, 1, 4);
      const label = String(value), width = textWidth(context, label, MONO);
      if (x - lastLabel < width + 6) return;
      text(context, label, x, bottom + 10, colours.text, MONO, value ? "center" : "left");
      lastLabel = x + width / 2;
    };
    chunks.forEach((chunk, i) => {
      const { x0, x1, broken } = this.readable[i];
      this.drawSegment(context, chunk, LEFT + x0, x1 - x0 - 1, broken);
      tick(chunk.q0, LEFT + x0);
      if (i === chunks.length - 1) tick(chunk.q1, LEFT + x1 - 1);
    });
  }

  drawSegment(context, chunk, x, width, broken) {
    const { theme } = this, { background } = theme.colours, y = READABLE_Y;
    const fill = theme.fill(chunk), ink = inkOn(fill), label = chunk.request.label;
    context.fillStyle = fill;
    context.fillRect(x, y, Math.max(1, width), RIBBON);
    if (chunk.recomputed) hatch(context, x, y, (width * chunk.recomputed) / chunk.n, RIBBON, background, 4);
    if (width > textWidth(context, label, SMALL) + 3) {
      const raised = chunk.drafts ? -4 : chunk.decode ? -2 : 0;
      text(context, label, x + width / 2, y + RIBBON / 2 + raised, ink, SMALL, "center");
    }
    if (chunk.drafts && width > 5) {
      draftCells(context, x + 2, y + RIBBON - 8, width - 4, 6, chunk, ink);
    } else if (chunk.decode && width > 5) {
      context.fillStyle = ink;
      dot(context, x + width / 2, y + RIBBON - 4, 1.6);
    }
    if (broken && width > 40) breakMark(context, x + width - 12, y, RIBBON, background);
  }

  // -- each sequence against its KV ------------------------------------------------------------------------------

  rowY(i) {
    return ROWS_Y + i * this.row;
  }

  drawRows(context, width) {
    const { chunks, row } = this, { colours } = this.theme, bottom = this.rowY(chunks.length);
    text(context, "Each sequence against its KV", LEFT, ROWS_Y - 12, colours.text, BOLD);
    this.drawLegend(context, width);
    const values = ticksIn(context, this.kvMost, this.kvScale(this.kvMost) - LEFT, 6);
    context.fillStyle = colours.hairline;
    for (const value of values) context.fillRect(Math.round(this.kvScale(value)), ROWS_Y, 1, bottom - ROWS_Y + 3);
    tickLabels(context, values, this.kvScale, bottom + 10, colours.muted);
    text(context, "KV position", LEFT - 8, bottom + 10, colours.muted, SMALL, "right");
    chunks.forEach((chunk, i) => {
      const y = this.rowY(i), top = y + (row > 12 ? 3 : 1), height = row - (row > 12 ? 6 : 2);
      this.drawCachedKv(context, chunk, top, height);
      this.drawNewRows(context, chunk, top, height);
      if (row >= 12) this.drawBlockTicks(context, chunk, top, height);
      if (row >= 11 || !chunk.decode) this.labelRow(context, chunk, y + row / 2, this.labels[i]);
    });
  }

  labelRow(context, chunk, y, label) {
    requestLabel(context, this.theme, chunk.request, LEFT - 8, y);
    const right = Math.max(this.kvScale(chunk.end), this.kvScale(chunk.start) + 8);
    text(context, label, right + 10, y, this.theme.colours.muted, MONO);
  }

  /** KV computed in earlier steps; the part outside the window of the chunk's first row is read by none of its rows. */
  drawCachedKv(context, chunk, top, height) {
    const { colours } = this.theme, zero = this.kvScale(0);
    context.fillStyle = colours.kv;
    context.fillRect(zero, top, this.kvScale(chunk.start) - zero, height);
    if (!this.window) return;
    const unread = this.kvScale(firstSeen(chunk.start, this.window));
    context.fillStyle = colours.background;
    context.fillRect(zero, top, unread - zero, height);
    hatch(context, zero, top, unread - zero, height, colours.kv, 4);
  }

  /** New query rows: a causal trapezoid for a chunk (row i sees start + i + 1 positions), a marker for a decode. */
  drawNewRows(context, chunk, top, height) {
    const { theme } = this, before = this.kvScale(chunk.start), after = this.kvScale(chunk.end);
    if (chunk.decode) {
      const half = height / 2, reach = Math.min(5, half);
      context.fillStyle = theme.hue(chunk.request.index) || theme.colours.prefill;
      context.strokeStyle = theme.colours.outline;
      context.lineWidth = 0.75;
      polygon(context, [[after, top], [after + reach, top + half], [after, top + height], [after - reach, top + half]]);
      context.fill();
      context.stroke();
      return;
    }
    context.fillStyle = theme.prefill(chunk.request.index);
    polygon(context, [
      [before, top],
      [before + (after - before) / chunk.n, top],
      [Math.max(after, before + 3), top + height],
      [before, top + height],
    ]);
    context.fill();
  }

  drawBlockTicks(context, chunk, top, height) {
    const size = this.blockSize, gap = this.kvScale(size) - this.kvScale(0);
    if (!size || gap < 6) return;
    context.fillStyle = mix(this.theme.colours.kv, this.theme.colours.background, 0.55);
    for (let kv = size; kv < chunk.start; kv += size) context.fillRect(this.kvScale(kv) - 0.5, top, 1, height);
  }

  drawLegend(context, width) {
    const { colours } = this.theme;
    const shape = (corners) => (context, x) => {
      context.fillStyle = colours.prefill;
      polygon(context, corners.map(([dx, dy]) => [x + dx, dy]));
      context.fill();
    };
    const entries = [
      { name: "KV in cache", mark: box(colours.kv, 14, 8), width: 62 },
      { name: "new rows, causal", mark: shape([[0, -4], [14, 4], [0, 4]]), width: 84 },
      { name: "decode", mark: shape([[7, -4.5], [11, 0], [7, 4.5], [3, 0]]), width: 38 },
    ];
    if (this.window) {
      entries.push({ name: `outside window ${this.window}`, mark: hatched(colours.muted, 14, 8), width: 100 });
    }
    const x = width - RIGHT - entries.reduce((sum, entry) => sum + entry.width + 32, 0);
    if (x >= LEFT + 300) legendRow(context, entries, x, width, ROWS_Y - 12, 32, colours.muted);
  }

  // -- the cursor ------------------------------------------------------------------------------------------------

  drawOverlay(context, width) {
    const { cursor, chunks } = this, { colours } = this.theme;
    (chunks || []).forEach((chunk, i) => {
      const selected = cursor.selected === chunk.request.index, hovered = cursor.hover.request === chunk.request.index;
      if (!selected && !hovered) return;
      context.strokeStyle = selected ? colours.cursor : colours.outline;
      context.lineWidth = selected ? 1.5 : 1;
      context.strokeRect(1.5, this.rowY(i) + 0.5, width - 3, this.row - 1);
      const { x0, x1 } = this.readable[i];
      context.strokeRect(LEFT + x0 - 0.5, READABLE_Y - 1, x1 - x0, RIBBON + 2);
      const left = this.trueScale(chunk.q0);
      context.strokeRect(left - 0.5, TRUE_Y - 1, Math.max(2, this.trueScale(chunk.q1) - left), RIBBON + 2);
      if (!hovered || !cursor.hover.kv) return;
      const [from, to] = cursor.hover.kv, kvLeft = this.kvScale(from);
      const wide = Math.max(2, this.kvScale(Math.min(to, chunk.end)) - kvLeft);
      context.fillStyle = colours.cursor;
      context.fillRect(kvLeft, this.rowY(i) + this.row - 3, wide, 2.5);
    });
  }

  /** Index of the chunk under a point, -1 for none. */
  chunkAt(x, y) {
    if (y >= TRUE_Y && y < TRUE_Y + RIBBON) {
      return this.chunks.findIndex((chunk) => x >= this.trueScale(chunk.q0) && x < this.trueScale(chunk.q1));
    }
    if (y >= READABLE_Y && y < READABLE_Y + RIBBON) {
      return this.readable.findIndex(({ x0, x1 }) => x - LEFT >= x0 && x - LEFT < x1);
    }
    return y >= ROWS_Y ? Math.floor((y - ROWS_Y) / this.row) : -1;
  }

  hit(x, y) {
    const chunk = this.chunks?.[this.chunkAt(x, y)];
    if (!chunk) return null;
    const hover = { request: chunk.request.index, chunk: chunk.index };
    const lines = [
      `${nameOf(chunk.request)}: ${chunk.decode ? "decode" : `prefill chunk of ${counted(chunk.n, "token")}`}`,
      `query rows ${formatRange(chunk.q0, chunk.q1)} of ${formatNumber(this.total)}`,
      kvOf(chunk),
    ];
    const position = Math.floor(((x - LEFT) / (this.kvScale(this.kvMost) - LEFT)) * this.kvMost);
    if (y >= ROWS_Y && this.blockSize && position >= 0 && position < chunk.end) {
      const logical = Math.floor(position / this.blockSize);
      const block = this.store.blockTable(chunk.request, this.cursor.step)[logical];
      Object.assign(hover, { kv: [logical * this.blockSize, (logical + 1) * this.blockSize], block });
      lines.push(`position ${formatNumber(position)}: logical block ${logical}, physical block ${block ?? "–"}`);
    }
    if (!chunk.decode) lines.push(limitOf(chunk));
    if (chunk.drafts) lines.push(draftsOf(chunk));
    lines.push("click to see its attention mask");
    return { hover, lines, request: chunk.request };
  }

  clicked(hit) {
    this.cursor.select(hit.request.index);
    this.view.inspector.pin({ kind: "request", request: hit.request.index });
  }

  // -- words -----------------------------------------------------------------------------------------------------

  describe() {
    const { chunks, total, budget } = this, step = this.store.label(this.cursor.step);
    return `step ${step}, ${counted(chunks.length, "sequence")}, ${total} of ${budget} query rows`;
  }

  tableData() {
    this.layout();
    const cells = (c) => {
      const rows = [c.q0, c.q1, c.n], kv = [c.start, c.end], sampled = c.sampled >= 0 ? c.sampled : "–";
      const drafts = c.drafts ? `${c.accepted} of ${c.drafts}` : "–";
      return [c.seq, nameOf(c.request), roleOf(c), ...rows, ...kv, limitOf(c), drafts, sampled];
    };
    const kv = ["KV before", "KV after"];
    return {
      caption: `Packed batch of step ${this.store.label(this.cursor.step)}`,
      headings: [
        "sequence",
        "request",
        "kind",
        "q from",
        "q to",
        "rows",
        ...kv,
        "why not more",
        "drafts accepted",
        "sampled",
      ],
      rows: this.chunks.map(cells),
    };
  }
}

// The packed batch: the query rows of all sequences one after another, and each sequence against its KV.

import { formatNumber, plain } from "./dom.js";
import { BOLD, MONO, SMALL, hatch, requestLabel, text, textWidth, ticks } from "./drawing.js";
import { readableScale } from "./geometry.js";
import { CanvasPanel } from "./panel.js";
import { mix } from "./theme.js";

const LEFT = 84, RIGHT = 16, RIBBON = 20;
const TRUE_Y = 14, READABLE_Y = 62, ROWS_Y = 128;

export class PackedPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "packed", title: "Packed batch", hint: "one forward pass: all query rows side by side, each sequence against its own KV", height: 260 });
  }

  base(what) { return what !== "hover"; }

  layout() {
    const { store, cursor } = this;
    this.chunks = store.numSteps ? store.chunks(cursor.step) : [];
    this.total = this.chunks.length ? this.chunks.at(-1).q1 : 0;
    this.budget = store.numSteps ? store.value("token_budget", cursor.step) : 0;
    this.blockSize = store.facts.block_size;
    this.window = this.windowOf();
    this.row = this.chunks.length <= 16 ? 20 : Math.max(7, Math.min(20, 320 / this.chunks.length));
    this.setHeight(ROWS_Y + Math.max(3, this.chunks.length) * this.row + 22);
    const space = this.width - LEFT - RIGHT;
    this.trueScale = (q) => LEFT + (q / Math.max(this.budget, this.total, 1)) * space;
    this.readable = readableScale(this.chunks.map((chunk) => chunk.n), space, 22);
    this.kvMost = Math.max(16, ...this.chunks.map((chunk) => chunk.end));
    const labels = Math.min(250, space * 0.36);
    this.kvScale = (kv) => LEFT + (kv / this.kvMost) * (space - labels);
  }

  /** Sliding window of the first layer, 0 for full attention. */
  windowOf() {
    const kernel = this.store.numSteps ? this.store.kernel(this.cursor.step) : null;
    return kernel && kernel.windows && kernel.windows[0] > 0 ? kernel.windows[0] : 0;
  }

  draw(context, width, height) {
    const { theme, chunks } = this, colours = theme.colours;
    if (!chunks.length) {
      text(context, this.store.numSteps ? "Nothing was scheduled in this step." : "No steps yet.", LEFT, 40, colours.muted);
      return;
    }
    this.drawTrueRibbon(context, width);
    this.drawReadableRibbon(context, width);
    this.drawRows(context, width, height);
  }

  drawTrueRibbon(context, width) {
    const { theme, chunks } = this, colours = theme.colours;
    text(context, "query rows", LEFT - 8, TRUE_Y + RIBBON / 2 - 6, colours.muted, { align: "right", font: SMALL });
    text(context, "to scale", LEFT - 8, TRUE_Y + RIBBON / 2 + 6, colours.muted, { align: "right", font: SMALL });
    for (const chunk of chunks) {
      const x = this.trueScale(chunk.q0), w = this.trueScale(chunk.q1) - x;
      context.fillStyle = chunk.decode ? theme.decode(chunk.request.index) : theme.prefill(chunk.request.index);
      context.fillRect(x, TRUE_Y, Math.max(0.5, w - (w > 6 ? 1 : 0)), RIBBON);
    }
    const end = this.trueScale(this.total), right = width - RIGHT;
    if (this.budget > this.total) {
      hatch(context, end, TRUE_Y, right - end, RIBBON, colours.hairline);
      const label = `${formatNumber(this.budget - this.total)} of ${formatNumber(this.budget)} unused`;
      if (right - end > textWidth(context, label, SMALL) + 12) text(context, label, end + 6, TRUE_Y + RIBBON / 2, colours.muted, { font: SMALL });
    }
    context.strokeStyle = colours.hairline;
    context.strokeRect(LEFT - 0.5, TRUE_Y - 0.5, right - LEFT, RIBBON + 1);
    for (const tick of ticks(0, Math.max(this.budget, this.total), 8, true)) {
      text(context, formatNumber(tick), this.trueScale(tick), TRUE_Y + RIBBON + 9, colours.muted, { align: tick ? "center" : "left", font: SMALL });
    }
  }

  drawReadableRibbon(context) {
    const { theme, chunks } = this, colours = theme.colours, y = READABLE_Y;
    text(context, "readable", LEFT - 8, y + RIBBON / 2, colours.muted, { align: "right", font: SMALL });
    text(context, "cu_seqlens_q", LEFT - 8, y + RIBBON + 10, colours.muted, { align: "right", font: MONO });
    let lastLabel = -Infinity;
    const tick = (value, x) => {
      context.fillStyle = colours.muted;
      context.fillRect(x, y + RIBBON, 1, 4);
      const label = String(value), wide = textWidth(context, label, MONO);
      if (x - lastLabel < wide + 6) return;
      text(context, label, x, y + RIBBON + 10, colours.text, { align: value ? "center" : "left", font: MONO });
      lastLabel = x + wide / 2;
    };
    chunks.forEach((chunk, i) => {
      const { x0, x1, broken } = this.readable[i], x = LEFT + x0, w = x1 - x0 - 1;
      const fill = chunk.decode ? theme.decode(chunk.request.index) : theme.prefill(chunk.request.index);
      context.fillStyle = fill;
      context.fillRect(x, y, Math.max(1, w), RIBBON);
      if (chunk.recomputed) hatch(context, x, y, (w * chunk.recomputed) / chunk.n, RIBBON, colours.background, 4);
      const ink = this.view.ink(fill);
      const label = plain(chunk.request.id, 14);
      if (w > textWidth(context, label, SMALL) + 3) text(context, label, x + w / 2, y + RIBBON / 2 + (chunk.decode ? -2 : 0), ink, { align: "center", font: SMALL });
      if (chunk.decode && w > 5) {
        context.fillStyle = ink;
        context.beginPath();
        context.arc(x + w / 2, y + RIBBON - 4, 1.6, 0, 7);
        context.fill();
      }
      if (broken && w > 40) drawBreak(context, x + w - 12, y, RIBBON, colours.background);
      tick(chunk.q0, x);
      if (i === chunks.length - 1) tick(chunk.q1, LEFT + x1 - 1);
    });
  }

  rowY(i) { return ROWS_Y + i * this.row; }

  drawRows(context, width, height) {
    const { theme, chunks, row } = this, colours = theme.colours;
    text(context, "Each sequence against its KV", LEFT, ROWS_Y - 12, colours.text, { font: BOLD });
    this.drawLegend(context, width);
    const bottom = this.rowY(chunks.length);
    const labelsFit = row >= 11;
    for (const tick of ticks(0, this.kvMost, 6, true)) {
      context.fillStyle = colours.hairline;
      context.fillRect(Math.round(this.kvScale(tick)), ROWS_Y, 1, bottom - ROWS_Y + 3);
      text(context, formatNumber(tick), this.kvScale(tick), bottom + 10, colours.muted, { align: tick ? "center" : "left", font: SMALL });
    }
    text(context, "kv position", LEFT - 8, bottom + 10, colours.muted, { align: "right", font: SMALL });
    chunks.forEach((chunk, i) => {
      const y = this.rowY(i), top = y + (row > 12 ? 3 : 1), h = row - (row > 12 ? 6 : 2);
      const before = this.kvScale(chunk.start), after = this.kvScale(chunk.end), zero = this.kvScale(0);
      context.fillStyle = colours.kv;
      context.fillRect(zero, top, before - zero, h);
      if (this.window) {
        // KV outside the window of the chunk's first row is not read by any of its rows.
        const unread = this.kvScale(Math.max(0, chunk.start - this.window + 1));
        context.fillStyle = colours.background;
        context.fillRect(zero, top, unread - zero, h);
        hatch(context, zero, top, unread - zero, h, colours.kv, 4);
      }
      this.drawNewRows(context, chunk, before, after, top, h);
      if (row >= 12) this.drawBlockTicks(context, chunk, top, h);
      if (labelsFit || !chunk.decode) {
        requestLabel(context, plain(chunk.request.id, 10), LEFT - 8, y + row / 2, colours.text, theme.hue(chunk.request.index));
        const what = `q[${formatNumber(chunk.q0)}, ${formatNumber(chunk.q1)})  ${chunk.n === 1 ? "1 row" : `${formatNumber(chunk.n)} rows`}  kv ${formatNumber(chunk.start)} → ${formatNumber(chunk.end)}`;
        text(context, what, Math.max(after, before + 8) + 10, y + row / 2, colours.muted, { font: MONO });
      }
    });
  }

  /** New query rows: a causal trapezoid for a chunk (row i sees start + i + 1 positions), a marker for a decode. */
  drawNewRows(context, chunk, before, after, top, h) {
    const { theme } = this;
    if (chunk.decode) {
      context.fillStyle = theme.hue(chunk.request.index) || theme.colours.prefill;
      context.strokeStyle = theme.colours.outline;
      context.lineWidth = 0.75;
      const x = after;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x + Math.min(5, h / 2), top + h / 2);
      context.lineTo(x, top + h);
      context.lineTo(x - Math.min(5, h / 2), top + h / 2);
      context.closePath();
      context.fill();
      context.stroke();
      return;
    }
    context.fillStyle = theme.prefill(chunk.request.index);
    context.beginPath();
    context.moveTo(before, top);
    context.lineTo(before + (after - before) / chunk.n, top);
    context.lineTo(Math.max(after, before + 3), top + h);
    context.lineTo(before, top + h);
    context.closePath();
    context.fill();
  }

  drawBlockTicks(context, chunk, top, h) {
    const size = this.blockSize, gap = this.kvScale(size) - this.kvScale(0);
    if (!size || gap < 6) return;
    context.fillStyle = mix(this.theme.colours.kv, this.theme.colours.background, 0.55);
    for (let kv = size; kv < chunk.start; kv += size) context.fillRect(this.kvScale(kv) - 0.5, top, 1, h);
  }

  drawLegend(context, width) {
    const { theme } = this, colours = theme.colours;
    const entries = [["KV in cache", (x) => { context.fillStyle = colours.kv; context.fillRect(x, -4, 14, 8); }, 62],
      ["new rows, causal", (x) => { context.fillStyle = colours.prefill; context.beginPath(); context.moveTo(x, -4); context.lineTo(x + 14, 4); context.lineTo(x, 4); context.fill(); }, 84],
      ["decode", (x) => { context.fillStyle = colours.prefill; context.beginPath(); context.moveTo(x + 7, -4.5); context.lineTo(x + 11, 0); context.lineTo(x + 7, 4.5); context.lineTo(x + 3, 0); context.fill(); }, 38]];
    if (this.window) entries.push([`outside window ${this.window}`, (x) => hatch(context, x, -4, 14, 8, colours.muted, 4), 100]);
    let x = width - RIGHT - entries.reduce((sum, e) => sum + e[2] + 32, 0);
    if (x < LEFT + 300) return;
    for (const [label, mark, wide] of entries) {
      context.save();
      context.translate(0, ROWS_Y - 12);
      mark(x);
      context.restore();
      text(context, label, x + 19, ROWS_Y - 12, colours.muted, { font: SMALL });
      x += wide + 32;
    }
  }

  drawOverlay(context, width) {
    const { cursor, theme, chunks } = this;
    if (!chunks) return;
    const colours = theme.colours;
    chunks.forEach((chunk, i) => {
      const selected = cursor.selected === chunk.request.index, hovered = cursor.hover.request === chunk.request.index;
      if (!selected && !hovered) return;
      context.strokeStyle = selected ? colours.cursor : colours.outline;
      context.lineWidth = selected ? 1.5 : 1;
      context.strokeRect(1.5, this.rowY(i) + 0.5, width - 3, this.row - 1);
      const { x0, x1 } = this.readable[i];
      context.strokeRect(LEFT + x0 - 0.5, READABLE_Y - 1, x1 - x0, RIBBON + 2);
      const at = this.trueScale(chunk.q0);
      context.strokeRect(at - 0.5, TRUE_Y - 1, Math.max(2, this.trueScale(chunk.q1) - at), RIBBON + 2);
      const kv = cursor.hover.kv;
      if (hovered && kv) {
        context.fillStyle = colours.cursor;
        context.fillRect(this.kvScale(kv[0]), this.rowY(i) + this.row - 3, Math.max(2, this.kvScale(Math.min(kv[1], chunk.end)) - this.kvScale(kv[0])), 2.5);
      }
    });
  }

  hit(x, y) {
    const { chunks } = this;
    if (!chunks || !chunks.length) return null;
    let i = -1, kv = null;
    if (y >= TRUE_Y && y < TRUE_Y + RIBBON) i = chunks.findIndex((chunk) => x >= this.trueScale(chunk.q0) && x < this.trueScale(chunk.q1));
    else if (y >= READABLE_Y && y < READABLE_Y + RIBBON) i = this.readable.findIndex(({ x0, x1 }) => x - LEFT >= x0 && x - LEFT < x1);
    else if (y >= ROWS_Y) i = Math.floor((y - ROWS_Y) / this.row);
    const chunk = chunks[i];
    if (!chunk) return null;
    const hover = { request: chunk.request.index, chunk: chunk.index };
    const lines = [`${plain(chunk.request.id)}: ${chunk.decode ? "decode" : `prefill chunk of ${formatNumber(chunk.n)}`}`,
      `query rows [${formatNumber(chunk.q0)}, ${formatNumber(chunk.q1)}) of ${formatNumber(this.total)}`, `KV ${formatNumber(chunk.start)} → ${formatNumber(chunk.end)}`];
    if (y >= ROWS_Y && this.blockSize) {
      const position = Math.floor(((x - LEFT) / (this.kvScale(this.kvMost) - LEFT)) * this.kvMost);
      if (position >= 0 && position < chunk.end) {
        const logical = Math.floor(position / this.blockSize), blocks = this.store.blockTable(chunk.request, this.cursor.step);
        kv = [logical * this.blockSize, (logical + 1) * this.blockSize];
        Object.assign(hover, { kv, block: blocks[logical] });
        lines.push(`position ${formatNumber(position)}: logical block ${logical}, physical block ${blocks[logical] ?? "–"}`);
      }
    }
    if (!chunk.decode) lines.push(chunk.limitedBy === "complete" ? "reaches its last known token" : `limited by ${chunk.limitedBy.replaceAll("_", " ")}`);
    lines.push("click for its exact q × kv rectangle");
    return { hover, lines, request: chunk.request };
  }

  clicked(hit) { this.cursor.select(hit.request.index); }

  describe() {
    return `step ${this.store.label(this.cursor.step)}, ${this.chunks.length} sequences, ${this.total} of ${this.budget} query rows`;
  }

  tableTwin() {
    this.layout();
    return {
      caption: `Packed batch of step ${this.store.label(this.cursor.step)}`, headings: ["sequence", "request", "arm", "q from", "q to", "rows", "KV before", "KV after", "limited by", "sampled"],
      rows: this.chunks.map((c) => [c.seq, plain(c.request.id), c.arm, c.q0, c.q1, c.n, c.start, c.end, c.limitedBy, c.sampled >= 0 ? c.sampled : "–"]),
    };
  }
}

function drawBreak(context, x, y, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  for (const dx of [0, 4]) {
    context.beginPath();
    context.moveTo(x + dx + 3, y);
    context.lineTo(x + dx - 1, y + height * 0.4);
    context.lineTo(x + dx + 3, y + height * 0.6);
    context.lineTo(x + dx - 1, y + height);
    context.stroke();
  }
}

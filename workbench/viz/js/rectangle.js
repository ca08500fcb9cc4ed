// The exact q x kv rectangle of one sequence with the work items that compute it, or, for a small batch, the
// whole block-diagonal mask cell by cell.

import { formatNumber, plain } from "./dom.js";
import { MONO, SMALL, text, ticks } from "./drawing.js";
import { tileKind } from "./geometry.js";
import { CanvasPanel } from "./panel.js";
import { mix } from "./theme.js";
import { workOf } from "./work.js";

const LEFT = 84, TOP = 40, RIGHT = 16, SMALL_ROWS = 64, SMALL_COLUMNS = 400, MOST_TILES = 4000;

export class RectanglePanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "rectangle", title: "Attention, exactly", hint: "rows are query tokens, columns KV positions; click a sequence above", height: 60 });
  }

  base(what) { return what !== "hover"; }

  layout() {
    const { store, cursor } = this;
    this.mode = "hint";
    if (!store.numSteps) return this.setHeight(40);
    this.chunks = store.chunks(cursor.step);
    const launch = store.kernel(cursor.step);
    this.window = launch?.windows?.[0] > 0 ? launch.windows[0] : 0;
    const chunk = this.chunks.find((candidate) => candidate.request.index === cursor.selected);
    const rows = this.chunks.reduce((sum, c) => sum + c.n, 0), columns = this.chunks.reduce((sum, c) => sum + c.end, 0);
    const space = this.width - LEFT - RIGHT;
    if (chunk) {
      this.mode = "one";
      this.chunk = chunk;
      this.shape = [chunk.n, chunk.end];
      this.work = workOf(store, cursor.step);
    } else if (this.chunks.length && rows <= SMALL_ROWS && columns <= SMALL_COLUMNS) {
      this.mode = "batch";
      this.shape = [rows, columns];
    } else {
      return this.setHeight(30);
    }
    this.dx = space / this.shape[1];
    this.dy = Math.max(this.shape[0] === 1 ? 18 : 2, Math.min(14, this.dx, 260 / this.shape[0]));
    if (this.shape[0] * this.dy > 300) this.dy = 300 / this.shape[0];
    this.setHeight(TOP + this.shape[0] * this.dy + 24);
  }

  draw(context, width, height) {
    const colours = this.theme.colours;
    if (this.mode === "hint") {
      const text_ = this.store.numSteps ? "Click a sequence in the packed batch to see its rectangle; batches of at most 64 rows are drawn cell by cell." : "No steps yet.";
      return text(context, text_, LEFT, 14, colours.muted);
    }
    if (this.mode === "one") this.drawOne(context, width);
    else this.drawBatch(context);
    for (const tick of ticks(0, this.shape[1], 8, true)) text(context, formatNumber(tick), LEFT + tick * this.dx, height - 12, colours.muted, { align: tick ? "center" : "left", font: SMALL });
    text(context, "kv column", LEFT - 8, height - 12, colours.muted, { align: "right", font: SMALL });
  }

  drawOne(context, width) {
    const { theme, chunk, dx, dy } = this, colours = theme.colours;
    const fill = theme.prefill(chunk.request.index), partial = mix(fill, colours.background, 0.45);
    const items = this.work.items.filter((item) => item.seq === chunk.seq);
    const block = Math.max(1, this.work.blockKv);
    let computed = 0, diagonal = 0, skipped = 0;
    const tiles = items.reduce((sum, item) => sum + Math.ceil(chunk.end / block), 0);
    const grid = tiles <= MOST_TILES;
    for (const item of items) {
      const q0 = item.q_start - chunk.q0, q1 = q0 + item.num_rows;
      for (let k = 0; k < chunk.end; k += block) {
        const k1 = Math.min(k + block, chunk.end);
        const mine = k < item.kv_end && k1 > item.kv_start;
        const kind = tileKind(chunk.start + q0, chunk.start + q1, k, k1, this.window);
        if (item.split > 0 && !mine) continue;
        if (kind === "skipped") {
          if (item.split === 0) skipped++;
          if (grid && dx * block > 5 && dy * item.num_rows > 5) {
            context.fillStyle = colours.hairline;
            context.fillRect(LEFT + ((k + k1) / 2) * dx - 1, TOP + ((q0 + q1) / 2) * dy - 1, 2, 2);
          }
          continue;
        }
        if (!mine) continue;
        computed++;
        const x = LEFT + k * dx, y = TOP + q0 * dy, w = (k1 - k) * dx, h = item.num_rows * dy;
        if (kind === "full") {
          context.fillStyle = fill;
          context.fillRect(x, y, w, h);
        } else {
          diagonal++;
          this.fillVisible(context, fill, partial, q0, q1, k, k1);
        }
        if (grid && w > 4 && h > 4) {
          context.strokeStyle = colours.background;
          context.lineWidth = 1;
          context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        }
      }
    }
    if (this.dx >= 6 && this.dy >= 6) this.drawCellGrid(context);
    context.strokeStyle = colours.muted;
    context.strokeRect(LEFT - 0.5, TOP - 0.5, this.shape[1] * dx + 1, this.shape[0] * dy + 1);
    text(context, `${plain(chunk.request.id)}: ${formatNumber(chunk.n)} × ${formatNumber(chunk.end)}`, LEFT, 10, colours.text);
    const dense = items.filter((item) => item.split === 0).length * Math.ceil(chunk.end / block);
    text(context, `${formatNumber(computed)} tiles computed (${formatNumber(diagonal)} partly masked) of ${formatNumber(dense)} in a dense mask; ${formatNumber(skipped)} skipped · ${this.work.source === "launch" ? "from the launch" : "planned"}`, LEFT, 26, colours.muted);
    const row = (i) => text(context, formatNumber(chunk.start + i), LEFT - 8, TOP + (i + 0.5) * dy, colours.muted, { align: "right", font: SMALL });
    row(0);
    if (chunk.n > 1 && this.shape[0] * dy > 24) row(chunk.n - 1);
    text(context, "position", LEFT - 8, 26, colours.muted, { align: "right", font: SMALL });
  }

  /** The part of a partly masked tile that its rows may see, and the rest in a light tone. */
  fillVisible(context, fill, partial, q0, q1, k0, k1) {
    const { chunk, dx, dy } = this;
    context.fillStyle = partial;
    context.fillRect(LEFT + k0 * dx, TOP + q0 * dy, (k1 - k0) * dx, (q1 - q0) * dy);
    context.fillStyle = fill;
    for (let q = q0; q < q1; q++) {
      const position = chunk.start + q, from = this.window ? Math.max(k0, position - this.window + 1) : k0, to = Math.min(k1, position + 1);
      if (to > from) context.fillRect(LEFT + from * dx, TOP + q * dy, (to - from) * dx, dy + 0.3);
    }
  }

  drawCellGrid(context) {
    context.fillStyle = this.theme.colours.background;
    for (let q = 1; q < this.shape[0]; q++) context.fillRect(LEFT, TOP + q * this.dy - 0.5, this.shape[1] * this.dx, 0.5);
    for (let k = 1; k < this.shape[1]; k++) context.fillRect(LEFT + k * this.dx - 0.5, TOP, 0.5, this.shape[0] * this.dy);
  }

  drawBatch(context) {
    const { theme, chunks, dx, dy } = this, colours = theme.colours;
    text(context, `block-diagonal mask: ${this.shape[0]} × ${this.shape[1]} cells; filled = 0, empty = −∞`, LEFT, 10, colours.text);
    let column = 0;
    for (const chunk of chunks) {
      context.strokeStyle = colours.hairline;
      context.strokeRect(LEFT + column * dx, TOP + chunk.q0 * dy, chunk.end * dx, chunk.n * dy);
      for (let q = 0; q < chunk.n; q++) {
        const position = chunk.start + q, from = this.window ? Math.max(0, position - this.window + 1) : 0;
        context.fillStyle = chunk.decode ? theme.hue(chunk.request.index) || colours.prefill : theme.prefill(chunk.request.index);
        for (let k = from; k <= position; k++) context.fillRect(LEFT + (column + k) * dx, TOP + (chunk.q0 + q) * dy, Math.max(0.6, dx - (dx > 4 ? 1 : 0)), Math.max(0.6, dy - (dy > 4 ? 1 : 0)));
      }
      if (chunk.n * dy >= 9) text(context, plain(chunk.request.id, 11), LEFT - 8, TOP + (chunk.q0 + chunk.n / 2) * dy, colours.text, { align: "right", font: MONO });
      column += chunk.end;
    }
    context.strokeStyle = colours.muted;
    context.strokeRect(LEFT - 0.5, TOP - 0.5, this.shape[1] * dx + 1, this.shape[0] * dy + 1);
  }

  drawOverlay(context) {
    const { cursor, chunk } = this;
    if (this.mode !== "one" || cursor.hover.request !== chunk.request.index || !cursor.hover.kv) return;
    const [k0, k1] = cursor.hover.kv;
    context.strokeStyle = this.theme.colours.cursor;
    context.lineWidth = 1.5;
    context.strokeRect(LEFT + k0 * this.dx, TOP - 1, Math.max(2, (Math.min(k1, chunk.end) - k0) * this.dx), this.shape[0] * this.dy + 2);
  }

  hit(x, y) {
    if (this.mode === "hint") return null;
    const q = Math.floor((y - TOP) / this.dy), k = Math.floor((x - LEFT) / this.dx);
    if (q < 0 || k < 0 || q >= this.shape[0] || k >= this.shape[1]) return null;
    let chunk = this.chunk, row = q, column = k;
    if (this.mode === "batch") {
      chunk = this.chunks.find((c) => q >= c.q0 && q < c.q1);
      row = q - chunk.q0;
      for (const other of this.chunks) {
        if (other === chunk) break;
        column -= other.end;
      }
      if (column < 0 || column >= chunk.end) return { hover: { request: chunk.request.index }, lines: [`row ${q} of ${plain(chunk.request.id)}`, "another sequence's KV: −∞"] };
    }
    const position = chunk.start + row, size = this.store.facts.block_size || 1, logical = Math.floor(column / size);
    const seen = column <= position && (!this.window || column > position - this.window);
    const block = this.store.blockTable(chunk.request, this.cursor.step)[logical];
    const lines = [`${plain(chunk.request.id)}: position ${formatNumber(position)} × KV ${formatNumber(column)}`, seen ? "attends" : column > position ? "masked: later than the row" : "masked: outside the window", `logical block ${logical}, physical block ${block ?? "–"}`];
    const hover = { request: chunk.request.index, kv: [logical * size, (logical + 1) * size], block };
    if (this.mode === "one") {
      const item = this.work.items.findIndex((w) => w.seq === chunk.seq && chunk.q0 + row >= w.q_start && chunk.q0 + row < w.q_start + w.num_rows && column >= w.kv_start && column < w.kv_end);
      if (item >= 0) {
        hover.item = item;
        lines.push(`computed by work item ${item}`);
      }
    }
    return { hover, lines };
  }

  describe() {
    return this.mode === "one" ? `${plain(this.chunk.request.id)}, ${this.shape[0]} rows by ${this.shape[1]} positions` : this.mode === "batch" ? `block-diagonal mask of ${this.shape[0]} by ${this.shape[1]} cells` : "nothing chosen";
  }

  tableTwin() {
    this.layout();
    if (this.mode === "hint") return { headings: ["nothing chosen"], rows: [] };
    const chunks = this.mode === "one" ? [this.chunk] : this.chunks;
    const rows = chunks.flatMap((c) => Array.from({ length: Math.min(c.n, 200) }, (_, q) => [plain(c.request.id), c.q0 + q, c.start + q, this.window ? Math.max(0, c.start + q - this.window + 1) : 0, c.start + q + 1]));
    return { caption: "KV positions each row may attend to", headings: ["request", "row", "position", "from", "up to, not including"], rows };
  }
}

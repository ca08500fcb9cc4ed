// The exact q x kv rectangle of one sequence with the work items that compute it or, for a small batch, the whole
// block-diagonal mask cell by cell.

import { counted, formatNumber } from "./dom.js";
import { fitting, fittingEnd, FONT, MONO, SMALL, text, textWidth, tickLabels, ticksIn } from "./drawing.js";
import { firstSeen, tileKind } from "./geometry.js";
import { askForKernelRun } from "./kernel_page.js";
import { box, LegendLines } from "./legend.js";
import { CanvasPanel } from "./panel.js";
import { nameOf } from "./request.js";
import { mix } from "./theme.js";
import { fieldsOf, workOf } from "./work.js";

const LEFT = 84, TOP = 40, RIGHT = 16;

/** The largest batch that is drawn cell by cell. */
const SMALL_ROWS = 64, SMALL_COLUMNS = 400;

/** Above this number of tiles their edges are not drawn. */
const MOST_TILES = 4000;

/** Maximum number of rows of a sequence in the table. */
const TABLE_ROWS = 200;

/** The mask of a chunk: for each query row its position, and the KV positions [from, to) that it may attend to. */
function maskOf(chunk, window) {
  return Array.from({ length: chunk.n }, (_, q) => {
    const position = chunk.start + q;
    return { row: chunk.q0 + q, position, from: firstSeen(position, window), to: position + 1 };
  });
}

/** The colour of what a tile computes and the mask takes away. */
const masked = (fill, colours) => mix(fill, colours.background, 0.45);

export class RectanglePanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "rectangle",
      title: "Attention mask",
      hint: "query tokens against KV positions; click a sequence of the packed batch for its own",
      height: 60,
    });
    this.legend = new LegendLines();
    this.body.prepend(this.legend.element);
  }

  layout() {
    const { store, cursor } = this;
    this.mode = "hint"; // "hint" | "one" sequence | "batch"
    if (!store.numSteps) return this.setHeight(40);
    this.nameGroup();
    this.chunks = store.chunks(cursor.step);
    this.window = store.window(cursor.step);
    this.masks = this.chunks.map((chunk) => maskOf(chunk, this.window)); // by sequence
    const rows = this.chunks.reduce((sum, c) => sum + c.n, 0);
    const columns = this.chunks.reduce((sum, c) => sum + c.end, 0);
    const small = rows <= SMALL_ROWS && columns <= SMALL_COLUMNS;
    const chunk = this.chunks.find((candidate) => candidate.request.index === cursor.selected) ||
      (small ? undefined : this.largest());
    if (chunk) {
      this.mode = "one";
      this.chunk = chunk;
      this.shape = [chunk.n, chunk.end];
      this.work = workOf(store, cursor.step);
    } else if (this.chunks.length) {
      this.mode = "batch";
      this.shape = [rows, columns];
    } else return this.setHeight(30);
    const [height, width] = this.shape;
    this.dx = (this.width - LEFT - RIGHT) / width;
    this.dy = Math.max(height === 1 ? 18 : 2, Math.min(14, this.dx, 260 / height));
    if (height * this.dy > 300) this.dy = 300 / height;
    this.setHeight(TOP + height * this.dy + 24);
  }

  /**
   * The chunk with the most query rows, of several the one with the longest KV. Without a selection, a batch too large
   * for its cells is shown by it.
   */
  largest() {
    return [...this.chunks].sort((a, b) => b.n - a.n || b.end - a.end)[0];
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(context, _width, height) {
    const { muted } = this.theme.colours;
    this.legend.show(this.mode === "one" ? this.legendEntries() : [], this.width, muted);
    if (this.mode === "hint") {
      const why = this.store.numSteps ? "Nothing was scheduled in this step." : "No steps yet.";
      return text(context, why, LEFT, 14, muted);
    }
    if (this.mode === "one") this.drawOne(context);
    else this.drawBatch(context);
    const columns = ticksIn(context, this.shape[1], this.shape[1] * this.dx, 8);
    tickLabels(context, columns, (k) => LEFT + k * this.dx, height - 12, muted);
    text(context, "KV column", LEFT - 8, height - 12, muted, SMALL, "right");
  }

  /** The marks of a sequence's tiles, as `drawItem` and `fillTile` draw them. */
  legendEntries() {
    const { colours } = this.theme, fill = this.theme.prefill(this.chunk.request.index);
    return [
      { name: "attends", mark: box(fill, 12, 10), key: fill },
      { name: "computed and masked", mark: box(masked(fill, colours), 12, 10) },
      { name: "tile skipped", mark: (context, x) => box(colours.muted, 2, 2)(context, x + 5) },
    ];
  }

  /** Fill the cells of rows [q0, q1) and columns [k0, k1). */
  fillCells(context, q0, q1, k0, k1) {
    const { dx, dy } = this;
    context.fillRect(LEFT + k0 * dx, TOP + q0 * dy, (k1 - k0) * dx, (q1 - q0) * dy);
  }

  drawFrame(context) {
    context.strokeStyle = this.theme.colours.muted;
    context.strokeRect(LEFT - 0.5, TOP - 0.5, this.shape[1] * this.dx + 1, this.shape[0] * this.dy + 1);
  }

  drawOne(context) {
    const { theme, chunk, dx, dy } = this, { colours } = theme;
    const items = this.work.items.filter((item) => item.seq === chunk.seq);
    const columns = Math.ceil(chunk.end / Math.max(1, this.work.blockKv));
    const counts = { computed: 0, diagonal: 0, skipped: 0 };
    for (const item of items) this.drawItem(context, item, items.length * columns <= MOST_TILES, counts);
    if (dx >= 6 && dy >= 6) this.drawCellGrid(context);
    this.drawFrame(context);
    const shape = `${formatNumber(chunk.n)} × ${formatNumber(chunk.end)}`;
    const own = this.cursor.selected === chunk.request.index;
    const which = own || this.chunks.length === 1 ? [] : [`the largest of ${this.chunks.length} sequences`];
    const title = fitting(context, [`${nameOf(chunk.request)}: ${shape}`, ...which], ", ", this.width - LEFT);
    text(context, title, LEFT, 10, colours.text);
    const dense = items.filter((item) => item.split === 0).length * columns;
    const tiles = [
      `${formatNumber(counts.computed)} of ${counted(dense, "tile")} computed`,
      `${formatNumber(counts.diagonal)} partly masked`,
      `${formatNumber(counts.skipped)} skipped`,
      this.work.source === "launch" ? "from the launch" : "planned",
    ];
    text(context, fitting(context, tiles, ", ", this.width - LEFT), LEFT, 26, colours.muted);
    const labelRow = (q) => {
      const y = TOP + (q + 0.5) * dy;
      text(context, formatNumber(chunk.start + q), LEFT - 8, y, colours.muted, SMALL, "right");
    };
    labelRow(0);
    if (chunk.n > 1 && chunk.n * dy > 24) labelRow(chunk.n - 1);
    text(context, "position", LEFT - 8, 26, colours.muted, SMALL, "right");
  }

  /** Draw the tiles of a work item and count them. A skipped tile is a point. */
  drawItem(context, item, edges, counts) {
    const { theme, chunk, dx, dy } = this, { colours } = theme, block = Math.max(1, this.work.blockKv);
    const q0 = item.q_start - chunk.q0, q1 = q0 + item.num_rows;
    for (let k0 = 0; k0 < chunk.end; k0 += block) {
      const k1 = Math.min(k0 + block, chunk.end), mine = k0 < item.kv_end && k1 > item.kv_start;
      const kind = tileKind(chunk.start + q0, chunk.start + q1, k0, k1, this.window);
      if (item.split > 0 && !mine) continue;
      if (kind === "skipped") {
        if (item.split === 0) counts.skipped++;
        if (!edges || dx * block <= 5 || dy * item.num_rows <= 5) continue;
        context.fillStyle = colours.muted;
        context.fillRect(LEFT + ((k0 + k1) / 2) * dx - 1, TOP + ((q0 + q1) / 2) * dy - 1, 2, 2);
        continue;
      }
      if (!mine) continue;
      counts.computed++;
      if (kind === "diagonal") counts.diagonal++;
      this.fillTile(context, kind, q0, q1, k0, k1);
      const width = (k1 - k0) * dx, height = item.num_rows * dy;
      if (!edges || width <= 4 || height <= 4) continue;
      context.strokeStyle = colours.background;
      context.lineWidth = 1;
      context.strokeRect(LEFT + k0 * dx + 0.5, TOP + q0 * dy + 0.5, width - 1, height - 1);
    }
  }

  /** Fill a tile; of a partly masked one, the masked part is lighter. */
  fillTile(context, kind, q0, q1, k0, k1) {
    const { theme, chunk, dx, dy } = this, fill = theme.prefill(chunk.request.index);
    context.fillStyle = kind === "full" ? fill : masked(fill, theme.colours);
    this.fillCells(context, q0, q1, k0, k1);
    if (kind === "full") return;
    context.fillStyle = fill;
    for (let q = q0; q < q1; q++) {
      const row = this.masks[chunk.seq][q], from = Math.max(k0, row.from), to = Math.min(k1, row.to);
      if (to > from) context.fillRect(LEFT + from * dx, TOP + q * dy, (to - from) * dx, dy + 0.3);
    }
  }

  drawCellGrid(context) {
    const { dx, dy } = this, [height, width] = this.shape;
    context.fillStyle = this.theme.colours.background;
    for (let q = 1; q < height; q++) context.fillRect(LEFT, TOP + q * dy - 0.5, width * dx, 0.5);
    for (let k = 1; k < width; k++) context.fillRect(LEFT + k * dx - 0.5, TOP, 0.5, height * dy);
  }

  drawBatch(context) {
    const { theme, dx, dy } = this, { colours } = theme, [height, width] = this.shape;
    const parts = [`block-diagonal mask: ${height} × ${width} cells`, "filled = 0, empty = −∞"];
    const title = fitting(context, parts, "; ", this.width);
    text(context, title, Math.max(0, Math.min(LEFT, this.width - textWidth(context, title, FONT))), 10, colours.text);
    const cell = (d) => Math.max(0.6, d - (d > 4 ? 1 : 0));
    let column = 0;
    for (const chunk of this.chunks) {
      context.strokeStyle = colours.hairline;
      context.strokeRect(LEFT + column * dx, TOP + chunk.q0 * dy, chunk.end * dx, chunk.n * dy);
      context.fillStyle = theme.hue(chunk.request.index) || colours.prefill;
      for (const { row, from, to } of this.masks[chunk.seq]) {
        for (let k = from; k < to; k++) {
          context.fillRect(LEFT + (column + k) * dx, TOP + row * dy, cell(dx), cell(dy));
        }
      }
      if (chunk.n * dy >= 9) {
        const y = TOP + (chunk.q0 + chunk.n / 2) * dy;
        text(context, fittingEnd(context, chunk.request.label, LEFT - 9), LEFT - 8, y, colours.text, MONO, "right");
      }
      column += chunk.end;
    }
    this.drawFrame(context);
  }

  drawOverlay(context) {
    const { chunk, dx, dy } = this, { hover } = this.cursor;
    if (this.mode !== "one" || hover.request !== chunk.request.index || !hover.kv) return;
    const [k0, k1] = hover.kv, width = Math.max(2, (Math.min(k1, chunk.end) - k0) * dx);
    context.strokeStyle = this.theme.colours.cursor;
    context.lineWidth = 1.5;
    context.strokeRect(LEFT + k0 * dx, TOP - 1, width, this.shape[0] * dy + 2);
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x, y) {
    if (this.mode === "hint") return null;
    const q = Math.floor((y - TOP) / this.dy), k = Math.floor((x - LEFT) / this.dx);
    const named = x < LEFT && this.mode === "batch" && this.chunks.find(({ q0, q1 }) => q >= q0 && q < q1);
    if (named) return { hover: { request: named.request.index }, lines: [nameOf(named.request)] };
    if (q < 0 || k < 0 || q >= this.shape[0] || k >= this.shape[1]) return null;
    if (this.mode === "one") return this.cellHit(this.chunk, q, k);
    let column = k;
    for (const chunk of this.chunks) {
      if (q < chunk.q1) {
        if (column >= 0 && column < chunk.end) return this.cellHit(chunk, q - chunk.q0, column);
        const lines = [`row ${q} of ${nameOf(chunk.request)}`, "another sequence's KV: −∞"];
        return { hover: { request: chunk.request.index }, lines };
      }
      column -= chunk.end;
    }
    return null;
  }

  /** A row of a chunk and a KV position of its sequence. */
  cellHit(chunk, row, kv) {
    const { store, cursor } = this, mask = this.masks[chunk.seq][row], { position } = mask;
    const size = store.facts.block_size || 1, logical = Math.floor(kv / size);
    const block = store.blockTable(chunk.request, cursor.step)[logical];
    const hover = { request: chunk.request.index, kv: [logical * size, (logical + 1) * size], block };
    const lines = [
      `${nameOf(chunk.request)}: position ${formatNumber(position)} × KV ${formatNumber(kv)}`,
      verdict(mask, kv),
      `logical block ${logical}, physical block ${block ?? "–"}`,
    ];
    const item = this.mode === "one" ? this.itemOf(chunk, chunk.q0 + row, kv) : -1;
    if (item >= 0) {
      hover.item = item;
      lines.push(`computed by work item ${item}`);
      const canRecord = this.view.can("kernel_run") && this.work.source === "launch";
      if (canRecord) lines.push("double-click: step through its threadgroup in the kernel lab");
    }
    return { hover, lines };
  }

  /** Index of the work item that computes a query row of a chunk at a KV position, -1 for none. */
  itemOf(chunk, q, kv) {
    const hasRow = (item) => q >= item.q_start && q < item.q_start + item.num_rows;
    const hasKv = (item) => kv >= item.kv_start && kv < item.kv_end;
    return this.work.items.findIndex((item) => item.seq === chunk.seq && hasRow(item) && hasKv(item));
  }

  clicked(hit, event) {
    const item = this.work?.items[hit.hover.item];
    if (event.detail === 2 && item && this.work.source === "launch") askForKernelRun(this.view, fieldsOf(item), 0);
    else super.clicked(hit, event);
  }

  describe() {
    if (this.mode === "hint") return "nothing selected";
    const [rows, columns] = this.shape;
    if (this.mode === "batch") return `block-diagonal mask of ${rows} by ${columns} cells`;
    return `${nameOf(this.chunk.request)}, ${counted(rows, "row")} by ${counted(columns, "position")}`;
  }

  tableData() {
    this.layout();
    if (this.mode === "hint") return { headings: ["nothing selected"], rows: [] };
    const rows = [];
    for (const chunk of this.mode === "one" ? [this.chunk] : this.chunks) {
      for (const { row, position, from, to } of this.masks[chunk.seq].slice(0, TABLE_ROWS)) {
        rows.push([nameOf(chunk.request), row, position, from, to]);
      }
    }
    return {
      caption: "KV positions that each row may attend to",
      headings: ["request", "row", "position", "from", "to (exclusive)"],
      rows,
    };
  }
}

/** Whether a row of a mask attends to a KV position. */
function verdict({ from, to }, kv) {
  if (kv >= to) return "masked: later than the query";
  return kv >= from ? "attends" : "masked: outside the window";
}

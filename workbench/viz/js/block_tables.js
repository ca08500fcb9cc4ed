// Block tables: the logical blocks of each scheduled request in order, with their physical ids.

import { counted, formatRange, plain } from "./dom.js";
import { MONO, requestLabel, SMALL, text } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { inkOn } from "./theme.js";

const LEFT = 84, ROW = 18, TOP = 20, MAX_ROWS = 16;

export class BlockTablesPanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "tables",
      title: "Block tables",
      hint: "physical block ids in logical order, filled as far as they are used",
      height: 120,
    });
    this.rows = [];
  }

  /** The chunks to show; when there are too many, those of requests in focus come first. */
  layout() {
    const { store, cursor, theme } = this;
    let chunks = store.numSteps ? store.chunks(cursor.step) : [];
    this.hidden = Math.max(0, chunks.length - MAX_ROWS);
    if (this.hidden) {
      const inFocus = (chunk) => theme.focus.has(chunk.request.index);
      chunks = [...chunks.filter(inFocus), ...chunks.filter((chunk) => !inFocus(chunk))].slice(0, MAX_ROWS);
    }
    this.rows = chunks.map((chunk) => ({ chunk, blocks: store.blockTable(chunk.request, cursor.step) }));
    this.setHeight(TOP + Math.max(2, this.rows.length) * ROW + (this.hidden ? 18 : 6));
    const longest = Math.max(1, ...this.rows.map((row) => row.blocks.length));
    const space = this.width - LEFT - (longest * 4 > this.width - LEFT - 54 ? 84 : 54);
    this.cell = Math.max(4, Math.min(30, space / longest));
    this.fits = Math.max(1, Math.floor(space / this.cell));
  }

  /** Slots of a logical block that hold the KV of a chunk's sequence. */
  filled(chunk, logical) {
    const size = this.store.facts.block_size;
    return Math.max(0, Math.min(size, chunk.end - logical * size));
  }

  draw(context) {
    const { colours } = this.theme, y = TOP + this.rows.length * ROW + 8;
    if (!this.rows.length) return text(context, "Nothing was scheduled in this step.", LEFT, 30, colours.muted);
    text(context, "logical block", LEFT - 8, 9, colours.muted, SMALL, "right");
    const every = Math.max(1, Math.ceil(34 / this.cell));
    for (let i = 0; i < this.fits; i += every) {
      text(context, String(i), LEFT + i * this.cell + this.cell / 2, 9, colours.muted, SMALL, "center");
    }
    this.rows.forEach((row, i) => this.drawRow(context, row, TOP + i * ROW));
    if (this.hidden) {
      text(context, `${counted(this.hidden, "more sequence")}: see the table`, LEFT, y, colours.muted, SMALL);
    }
  }

  drawRow(context, { chunk, blocks }, y) {
    const { theme, cell } = this, { colours } = theme, size = this.store.facts.block_size;
    requestLabel(context, theme, chunk.request, LEFT - 8, y + ROW / 2);
    const hue = theme.hue(chunk.request.index) || colours.owned;
    const width = cell - (cell > 8 ? 2 : 1), height = ROW - 5, shown = blocks.slice(0, this.fits);
    shown.forEach((block, logical) => {
      const x = LEFT + logical * cell, share = this.filled(chunk, logical) / size;
      context.fillStyle = colours.kv;
      context.fillRect(x, y + 2, width, height);
      context.fillStyle = hue;
      context.fillRect(x, y + 2 + height * (1 - share), width, height * share);
      if (cell < 22) return;
      const ink = share > 0.6 ? inkOn(hue) : colours.text;
      text(context, String(block), x + width / 2, y + 2 + height / 2 + 0.5, ink, MONO, "center");
    });
    const more = blocks.length > shown.length ? `… ${blocks.length}: ` : "";
    const fill = `${chunk.end - (blocks.length - 1) * size}/${size}`;
    text(context, `${more}${fill}`, LEFT + shown.length * cell + 4, y + ROW / 2, colours.muted, SMALL);
  }

  drawOverlay(context) {
    const { hover } = this.cursor, { colours } = this.theme;
    this.rows.forEach(({ chunk, blocks }, row) => {
      const y = TOP + row * ROW;
      if (hover.request === chunk.request.index) {
        context.strokeStyle = colours.outline;
        context.lineWidth = 1;
        context.strokeRect(1.5, y + 0.5, this.width - 3, ROW - 2);
      }
      blocks.slice(0, this.fits).forEach((block, logical) => {
        if (block !== hover.block) return;
        context.strokeStyle = colours.cursor;
        context.lineWidth = 2;
        context.strokeRect(LEFT + logical * this.cell - 1, y + 1, this.cell, ROW - 3);
      });
    });
  }

  hit(x, y) {
    const row = this.rows[Math.floor((y - TOP) / ROW)];
    if (!row || y < TOP) return null;
    const { blocks, chunk } = row, { request } = chunk, size = this.store.facts.block_size;
    const logical = Math.floor((x - LEFT) / this.cell), id = plain(request.id);
    if (x < LEFT || logical >= Math.min(this.fits, blocks.length)) {
      return { hover: { request: request.index }, lines: [id, counted(blocks.length, "block")], request };
    }
    const block = blocks[logical], kv = [logical * size, (logical + 1) * size];
    const used = `${this.filled(chunk, logical)} of ${size} slots used`;
    return {
      hover: { request: request.index, block, kv },
      request,
      block,
      lines: [
        `${id}: logical block ${logical}`,
        `physical block ${block}`,
        `KV positions ${formatRange(...kv)}, ${used}`,
      ],
    };
  }

  clicked(hit) {
    const request = hit.request.index, { block } = hit;
    this.view.inspector.pin(block === undefined ? { kind: "request", request } : { kind: "block", block, request });
  }

  describe() {
    return `${counted(this.rows.length, "block table")} at step ${this.store.label(this.cursor.step)}`;
  }

  tableData() {
    const { store, cursor } = this, chunks = store.numSteps ? store.chunks(cursor.step) : [];
    return {
      caption: `Block tables at step ${store.label(cursor.step)}`,
      headings: ["request", "blocks", "physical ids in logical order"],
      rows: chunks.map(({ request }) => {
        const blocks = store.blockTable(request, cursor.step);
        return [plain(request.id), blocks.length, blocks.join(" ")];
      }),
    };
  }
}

// Block tables: for each scheduled request its logical blocks in order, with the physical ids.

import { formatNumber, plain } from "./dom.js";
import { MONO, SMALL, requestLabel, text } from "./drawing.js";
import { CanvasPanel } from "./panel.js";

const LEFT = 84, ROW = 18, TOP = 20, MAX_ROWS = 16;

export class BlockTablesPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "tables", title: "Block tables", hint: "logical order, physical block ids; the last block shows how full it is", height: 120 });
  }

  base(what) { return what !== "hover"; }

  layout() {
    const { store, cursor } = this;
    const chunks = store.numSteps ? store.chunks(cursor.step) : [];
    const focused = chunks.filter((c) => this.theme.focus.has(c.request.index)), others = chunks.filter((c) => !this.theme.focus.has(c.request.index));
    this.hidden = Math.max(0, chunks.length - MAX_ROWS);
    this.rows = (this.hidden ? [...focused, ...others] : chunks).slice(0, MAX_ROWS)
      .map((chunk) => ({ chunk, blocks: store.blockTable(chunk.request, cursor.step) }));
    this.setHeight(TOP + Math.max(2, this.rows.length) * ROW + (this.hidden ? 18 : 6));
    const longest = Math.max(1, ...this.rows.map((row) => row.blocks.length));
    const space = this.width - LEFT - (longest * 4 > this.width - LEFT - 54 ? 84 : 54);
    this.cell = Math.max(4, Math.min(30, space / longest));
    this.fits = Math.max(1, Math.floor(space / this.cell));
  }

  draw(context) {
    const { theme, store } = this, colours = theme.colours, size = store.facts.block_size;
    if (!this.rows.length) return text(context, "Nothing was scheduled in this step.", LEFT, 30, colours.muted);
    text(context, "logical block", LEFT - 8, 9, colours.muted, { align: "right", font: SMALL });
    const every = Math.max(1, Math.ceil(34 / this.cell));
    for (let i = 0; i < this.fits; i += every) text(context, String(i), LEFT + i * this.cell + this.cell / 2, 9, colours.muted, { align: "center", font: SMALL });
    this.rows.forEach(({ chunk, blocks }, row) => {
      const y = TOP + row * ROW, hue = theme.hue(chunk.request.index) || colours.owned;
      requestLabel(context, plain(chunk.request.id, 10), LEFT - 8, y + ROW / 2, colours.text, theme.hue(chunk.request.index));
      const shown = this.shownBlocks(blocks);
      shown.forEach(([logical, block], i) => {
        const x = LEFT + i * this.cell, w = this.cell - (this.cell > 8 ? 2 : 1), h = ROW - 5;
        const filled = Math.max(0, Math.min(size, chunk.end - logical * size)) / size;
        context.fillStyle = colours.kv;
        context.fillRect(x, y + 2, w, h);
        context.fillStyle = hue;
        context.fillRect(x, y + 2 + h * (1 - filled), w, h * filled);
        if (this.cell >= 22) text(context, String(block), x + w / 2, y + 2 + h / 2 + 0.5, filled > 0.6 ? this.view.ink(hue) : colours.text, { align: "center", font: MONO });
      });
      const x = LEFT + shown.length * this.cell + 4;
      const fill = chunk.end - (blocks.length - 1) * size;
      text(context, `${blocks.length > shown.length ? `… ${blocks.length}: ` : ""}${fill}/${size}`, x, y + ROW / 2, colours.muted, { font: SMALL });
    });
    if (this.hidden) text(context, `${this.hidden} more sequences: see the table`, LEFT, TOP + this.rows.length * ROW + 8, colours.muted, { font: SMALL });
  }

  shownBlocks(blocks) {
    return blocks.slice(0, this.fits).map((block, logical) => [logical, block]);
  }

  drawOverlay(context) {
    const { cursor, theme } = this;
    (this.rows || []).forEach(({ chunk, blocks }, row) => {
      const y = TOP + row * ROW;
      if (cursor.hover.request === chunk.request.index) {
        context.strokeStyle = theme.colours.outline;
        context.lineWidth = 1;
        context.strokeRect(1.5, y + 0.5, this.width - 3, ROW - 2);
      }
      this.shownBlocks(blocks).forEach(([, block], i) => {
        if (block !== cursor.hover.block) return;
        context.strokeStyle = theme.colours.cursor;
        context.lineWidth = 2;
        context.strokeRect(LEFT + i * this.cell - 1, y + 1, this.cell, ROW - 3);
      });
    });
  }

  hit(x, y) {
    const entry = (this.rows || [])[Math.floor((y - TOP) / ROW)];
    if (!entry || y < TOP) return null;
    const { chunk, blocks } = entry, size = this.store.facts.block_size;
    const logical = Math.floor((x - LEFT) / this.cell);
    const hover = { request: chunk.request.index };
    if (x < LEFT || logical >= Math.min(this.fits, blocks.length)) return { hover, lines: [plain(chunk.request.id), `${formatNumber(blocks.length)} blocks`], request: chunk.request };
    hover.block = blocks[logical];
    hover.kv = [logical * size, (logical + 1) * size];
    const filled = Math.max(0, Math.min(size, chunk.end - logical * size));
    return { hover, request: chunk.request, lines: [`${plain(chunk.request.id)}: logical block ${logical}`, `physical block ${blocks[logical]}`, `KV positions [${formatNumber(hover.kv[0])}, ${formatNumber(hover.kv[1])}), ${filled} of ${size} slots used`] };
  }

  clicked(hit) { this.view.toggleFocus(hit.request); }

  describe() { return `${(this.rows || []).length} block tables at step ${this.store.label(this.cursor.step)}`; }

  tableTwin() {
    const { store, cursor } = this, chunks = store.numSteps ? store.chunks(cursor.step) : [];
    return {
      caption: `Block tables at step ${store.label(cursor.step)}`, headings: ["request", "blocks", "physical ids in logical order"],
      rows: chunks.map((chunk) => {
        const blocks = store.blockTable(chunk.request, cursor.step);
        return [plain(chunk.request.id), blocks.length, blocks.join(" ")];
      }),
    };
  }
}

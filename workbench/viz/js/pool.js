// The KV pool: one cell per physical block, always at the same place, and the numbers beside it.

import { formatNumber, plain } from "./dom.js";
import { SMALL, hatch, text, textWidth } from "./drawing.js";
import { poolColumns } from "./geometry.js";
import { CanvasPanel } from "./panel.js";
import { CACHED, FREE, OWNED } from "./pool_history.js";
import { mix } from "./theme.js";
import { readersOf } from "./work.js";

const TOP = 46, STATES = ["reserved", "free", "cached, evictable", "in use"];

export class PoolPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "pool", title: "KV pool", hint: "one cell per physical block, at a fixed place", height: 260 });
    this.image = document.createElement("canvas");
  }

  base(what) { return what !== "hover"; }

  layout() {
    const size = this.store.pool.size;
    this.columns = poolColumns(size);
    this.rows = Math.ceil(size / this.columns);
    this.cell = Math.max(1, Math.min(16, (this.width - 2) / this.columns));
    this.setHeight(TOP + Math.max(1, this.rows) * this.cell + 8);
  }

  draw(context, width) {
    const { store, theme, cursor } = this, colours = theme.colours;
    const pool = (this.pool = store.pool.at(cursor.step));
    if (!pool || !store.pool.size) return text(context, "No pool size in this trace.", 0, 20, colours.muted);
    this.drawNumbers(context, pool, width);
    this.paint(pool);
    context.imageSmoothingEnabled = false;
    const wide = this.columns * this.cell, high = this.rows * this.cell;
    context.drawImage(this.image, 0, TOP, wide, high);
    if (this.cell >= 5) this.drawGrid(context, wide, high);
    this.drawMarks(context, pool);
    context.strokeStyle = colours.hairline;
    context.strokeRect(0.5, TOP - 0.5, wide, high + 1);
  }

  drawNumbers(context, pool, width) {
    const colours = this.theme.colours, usable = Math.max(1, this.store.pool.size - 1);
    const [free, cached, owned] = [pool.counts[FREE], pool.counts[CACHED], pool.counts[OWNED]];
    const parts = [["in use", owned, colours.owned], ["cached, evictable", cached, colours.cached], ["free", free, colours.free]];
    let x = 0;
    for (const [label, count, colour] of parts) {
      const w = (count / usable) * (width - 1);
      context.fillStyle = colour;
      context.fillRect(x, 4, w, 8);
      if (label === "cached, evictable") hatch(context, x, 4, w, 8, colours.muted, 4);
      x += w;
    }
    context.strokeStyle = colours.hairline;
    context.strokeRect(0.5, 3.5, width - 1, 9);
    let at = 0;
    for (const [label, count, colour] of parts) {
      context.fillStyle = colour;
      context.fillRect(at, 20, 10, 10);
      if (label === "cached, evictable") hatch(context, at, 20, 10, 10, colours.muted, 4);
      context.strokeStyle = colours.muted;
      context.strokeRect(at + 0.5, 20.5, 9, 9);
      const words = `${formatNumber(count)} ${label}`;
      text(context, words, at + 15, 25.5, colours.text, { font: SMALL });
      at += textWidth(context, words, SMALL) + 30;
    }
    if (at + 90 < width) {
      context.strokeStyle = colours.outline;
      context.lineWidth = 1.5;
      context.strokeRect(at + 0.75, 20.75, 8.5, 8.5);
      text(context, "changed in this step", at + 15, 25.5, colours.muted, { font: SMALL });
    }
  }

  /** One pixel per block; the picture is scaled up without smoothing. */
  paint(pool) {
    const { theme, columns, rows } = this, colours = theme.colours;
    if (this.image.width !== columns || this.image.height !== rows) {
      this.image.width = columns;
      this.image.height = rows;
      this.pixels = null;
    }
    const context = this.image.getContext("2d");
    this.pixels ||= context.createImageData(columns, rows);
    const data = new Uint32Array(this.pixels.data.buffer);
    const packed = (colour) => 0xff000000 | (parseInt(colour.slice(5, 7), 16) << 16) | (parseInt(colour.slice(3, 5), 16) << 8) | parseInt(colour.slice(1, 3), 16);
    const byState = [packed(colours.hairline), packed(colours.free), packed(colours.cached), packed(colours.owned)];
    const hues = new Map([...theme.focus.keys()].map((index) => [index, packed(theme.hue(index))]));
    for (let block = 0; block < pool.state.length; block++) {
      const state = pool.state[block];
      data[block] = (state === OWNED && hues.get(pool.owner[block])) || byState[state];
    }
    context.putImageData(this.pixels, 0, 0);
  }

  drawGrid(context, wide, high) {
    context.fillStyle = this.theme.colours.hairline;
    for (let i = 1; i < this.columns; i++) context.fillRect(i * this.cell - 0.5, TOP, 1, high);
    for (let i = 1; i < this.rows; i++) context.fillRect(0, TOP + i * this.cell - 0.5, wide, 1);
  }

  xy(block) {
    return [(block % this.columns) * this.cell, TOP + Math.floor(block / this.columns) * this.cell];
  }

  drawMarks(context, pool) {
    const { theme, cursor, store, cell } = this, colours = theme.colours;
    let nextEvicted = -1;
    for (let block = 1; block < pool.state.length; block++) {
      const state = pool.state[block];
      const [x, y] = this.xy(block);
      if (state === CACHED) {
        if (cell >= 10) hatch(context, x + 0.5, y + 0.5, cell - 1, cell - 1, mix(colours.cached, colours.muted, 0.4), 4);
        if (nextEvicted < 0 || pool.freed[block] < pool.freed[nextEvicted]) nextEvicted = block;
      }
      if (pool.references[block] > 1 && cell >= 9) {
        const hue = theme.hue(pool.owner[block]);
        text(context, String(pool.references[block]), x + cell / 2, y + cell / 2 + 0.5, this.view.ink(hue || colours.owned), { align: "center", font: SMALL });
      } else if (pool.references[block] > 1 && cell >= 3) {
        context.fillStyle = colours.outline;
        context.fillRect(x + cell / 2 - 1, y + cell / 2 - 1, 2, 2);
      }
    }
    context.strokeStyle = colours.outline;
    context.lineWidth = cell >= 6 ? 1.5 : 1;
    const columns = (name) => store.columns.get(`pool.${name}`).data;
    for (let i = store.bounds.pool[cursor.step]; i < store.bounds.pool[cursor.step + 1]; i++) {
      const [x, y] = this.xy(columns("block")[i]);
      context.strokeRect(x + 0.5, y + 0.5, Math.max(1, cell - 1), Math.max(1, cell - 1));
    }
    if (nextEvicted > 0 && cell >= 5) {
      const [x, y] = this.xy(nextEvicted);
      context.fillStyle = colours.cursor;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + cell * 0.6, y);
      context.lineTo(x, y + cell * 0.6);
      context.fill();
    }
    this.nextEvicted = nextEvicted;
  }

  drawOverlay(context) {
    const { cursor, theme, store, pool } = this;
    if (!pool) return;
    const outline = (block, colour, wide) => {
      const [x, y] = this.xy(block);
      context.strokeStyle = colour;
      context.lineWidth = wide;
      context.strokeRect(x - 1, y - 1, this.cell + 2, this.cell + 2);
    };
    if (cursor.hover.request !== undefined) {
      const request = store.requests[cursor.hover.request];
      for (const block of store.blockTable(request, cursor.step)) outline(block, theme.colours.outline, 1);
    }
    if (cursor.hover.block > 0) outline(cursor.hover.block, theme.colours.cursor, 2);
  }

  hit(x, y) {
    const { pool, store, cursor } = this;
    if (!pool || y < TOP) return null;
    const column = Math.floor(x / this.cell), row = Math.floor((y - TOP) / this.cell);
    const block = row * this.columns + column;
    if (column < 0 || column >= this.columns || block >= pool.state.length) return null;
    if (block === 0) return { hover: { block }, lines: ["block 0", "reserved, never handed out"] };
    const state = pool.state[block], lines = [`block ${block}: ${STATES[state]}`], hover = { block };
    if (state === OWNED && pool.owner[block] >= 0) {
      const request = store.requests[pool.owner[block]];
      const logical = store.blockTable(request, cursor.step).indexOf(block);
      hover.request = request.index;
      lines.push(`owner ${plain(request.id)}${pool.references[block] > 1 ? ` and ${pool.references[block] - 1} more` : ""}`);
      if (logical >= 0) {
        hover.kv = [logical * store.facts.block_size, (logical + 1) * store.facts.block_size];
        lines.push(`logical block ${logical}: KV positions [${formatNumber(hover.kv[0])}, ${formatNumber(hover.kv[1])})`);
      }
    }
    const readers = readersOf(store.shadows.get(cursor.step), block);
    if (readers.length) lines.push(`read by ${readers.length} threadgroups of the Metal kernel: ${readers.slice(0, 4).map((at) => `(${at.join(", ")})`).join(" ")}${readers.length > 4 ? " …" : ""}`);
    if (state === CACHED) lines.push(block === this.nextEvicted ? "the next cached block to be evicted" : "still found by the prefix cache");
    if (pool.changed[block] >= 0) lines.push(`last changed in step ${store.label(pool.changed[block])}`);
    return { hover, lines, request: state === OWNED ? store.requests[pool.owner[block]] : undefined, block };
  }

  clicked(hit) {
    if (hit.request) this.view.toggleFocus(hit.request);
  }

  describe() {
    if (!this.pool) return "";
    const [, free, cached, owned] = this.pool.counts;
    return `${owned} blocks in use, ${cached} cached and evictable, ${free} free`;
  }

  tableTwin() {
    const { store, cursor } = this, pool = store.pool.at(cursor.step), rows = [];
    for (let block = 1; block < (pool ? pool.state.length : 0) && rows.length < 2000; block++) {
      if (pool.state[block] === FREE) continue;
      rows.push([block, STATES[pool.state[block]], pool.owner[block] >= 0 ? plain(store.requests[pool.owner[block]].id) : "–", pool.references[block], pool.changed[block]]);
    }
    return { caption: `Blocks that are not free at step ${store.label(cursor.step)}`, headings: ["block", "state", "first owner", "references", "last change"], rows };
  }
}

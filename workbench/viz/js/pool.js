// The KV pool: one cell per physical block, always at the same place, and above it the number of blocks in each state.

import { holdersOf, listed } from "./block_holders.js";
import { counted, formatNumber, formatRange, setText } from "./dom.js";
import { hatch, polygon, SMALL, text, textWidth } from "./drawing.js";
import { poolColumns } from "./geometry.js";
import { CanvasPanel } from "./panel.js";
import { CACHED, FREE, OWNED } from "./pool_history.js";
import { nameOf } from "./request.js";
import { readersOf } from "./shadow.js";
import { channels, inkOn, mix } from "./theme.js";
import { groupOf } from "./words.js";

const STATES = ["reserved", "free", "cached, evictable", "in use"], CHANGED = "changed in this step";
const NEXT = "evicted next";

/** Sizes of a cell in pixels; a screen of this width has room for more columns of them. */
const MOST_CELL = 16, LEAST_CELL = 12, WIDE = 2000;

/** Blocks from which a pool is large: its picture ends behind the used blocks, at the next doubling of the least. */
const LARGE = 2048, LEAST_SHOWN = 256;

const HINT = "one cell per physical block, always in the same place";

/** Least size in pixels of a cell with a number, and of one with a dot in its place. */
const NUMBERED = 9, DOTTED = 3;

const NUMBER = "a number counts the requests that share the block", DOT = "a dot marks a block that requests share";

/** Space for the name and the numbers of a KV cache group. */
const GROUP_WIDTH = 240, LINE = 18;

/** Maximum number of blocks in the table. */
const TABLE_BLOCKS = 2000;

export class PoolPanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "pool",
      title: "KV pool",
      hint: HINT,
      height: 260,
    });
    this.image = document.createElement("canvas");
  }

  /** Number of blocks in the picture. Most of a large pool is often never used, and would be an empty frame. */
  countShown() {
    const { size, used } = this.store.pool;
    let shown = LEAST_SHOWN;
    while (shown <= used) shown *= 2;
    return size < LARGE ? size : Math.min(size, shown);
  }

  layout() {
    const size = this.shown = this.countShown();
    this.columns = poolColumns(size);
    // A wide screen has more columns, of which each keeps its place as long as the width does.
    const isWide = globalThis.innerWidth >= WIDE;
    while (isWide && 2 * this.columns * LEAST_CELL <= this.width && this.columns < size) this.columns *= 2;
    this.rows = Math.ceil(size / this.columns);
    const { length: numGroups } = this.store.groups;
    this.groupsPerLine = Math.max(1, Math.floor(this.width / GROUP_WIDTH));
    this.oneLine = this.hasRoomForChanged();
    this.legendEnd = this.oneLine ? 28 : 28 + LINE;
    this.top = this.legendEnd + 18 + (numGroups > 1 ? LINE * Math.ceil(numGroups / this.groupsPerLine) : 0);
    this.cell = Math.max(1, Math.min(isWide ? 2 * MOST_CELL : MOST_CELL, (this.width - 2) / this.columns));
    this.setHeight(this.top + Math.max(1, this.rows) * this.cell + 8);
    setText(this.hintElement, this.hint());
  }

  /** The words below the title: those about marks that cells of this size can have. */
  hint() {
    const size = this.shown, last = this.store.pool.size - 1;
    const mark = this.cell >= NUMBERED ? `; ${NUMBER}` : this.cell >= DOTTED ? `; ${DOT}` : "";
    const unused = `; no step has used blocks ${formatNumber(size)} to ${formatNumber(last)}, which are left out`;
    return `${HINT}${mark}${size <= last ? unused : ""}`;
  }

  /** Whether the whole legend fits on one line, also when every number is as long as that of all blocks. */
  hasRoomForChanged() {
    const measure = this.image.getContext("2d"), most = formatNumber(this.store.pool.size);
    const labels = STATES.slice(1).map((state) => `${most} ${state}`);
    return [...labels, CHANGED, NEXT].reduce((wide, label) => wide + textWidth(measure, label, SMALL) + 30, 0) <=
      this.width;
  }

  /** Top left corner of a block. */
  xy(block) {
    return [(block % this.columns) * this.cell, this.top + Math.floor(block / this.columns) * this.cell];
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(context, width) {
    const { store, cell } = this, { colours } = this.theme;
    this.pool = store.pool.at(this.cursor.step);
    if (!this.pool || !store.pool.size) return text(context, "This trace has no pool size.", 0, 20, colours.muted);
    this.drawCounts(context, width);
    this.byGroup = this.store.groups.length > 1 ? this.store.blocksByGroup(this.cursor.step) : null;
    if (this.byGroup) this.drawGroups(context);
    this.paint();
    context.imageSmoothingEnabled = false;
    const wide = this.columns * cell, high = this.rows * cell;
    context.drawImage(this.image, 0, this.top, wide, high);
    if (cell >= 5) this.drawGrid(context);
    this.drawCells(context);
    if (this.byGroup && cell >= 5) this.drawGroupMarks(context);
    this.drawChanged(context);
    this.nextEvicted = nextEvicted(this.pool);
    if (this.nextEvicted > 0 && cell >= 5) this.drawNextEvicted(context);
    this.drawFrame(context);
  }

  /** Number of blocks in a row of the picture: the last may have fewer than the others. */
  inRow(row) {
    return Math.min(this.columns, this.shown - row * this.columns);
  }

  /** A line around all blocks, and around nothing else. */
  drawFrame(context) {
    const left = 0.5, top = this.top - 0.5, { rows, cell } = this, bottom = top + rows * cell + 1;
    const right = left + this.inRow(0) * cell, end = left + this.inRow(rows - 1) * cell;
    const step = end < right ? [[right, bottom - 1 - cell], [end, bottom - 1 - cell]] : [];
    context.strokeStyle = this.theme.colours.hairline;
    context.lineWidth = 1;
    polygon(context, [[left, top], [right, top], ...step, [end, bottom], [left, bottom]]);
    context.stroke();
  }

  /** A bar of all blocks by state, and below it its legend with the numbers. */
  drawCounts(context, width) {
    const { counts } = this.pool, { colours } = this.theme, usable = Math.max(1, this.store.pool.size - 1);
    const fills = [[OWNED, colours.owned], [CACHED, colours.cached], [FREE, colours.free]];
    const fill = (state, colour, x, y, wide, high) => {
      context.fillStyle = colour;
      context.fillRect(x, y, wide, high);
      if (state === CACHED) hatch(context, x, y, wide, high, colours.muted, 4);
    };
    let left = 0;
    for (const [state, colour] of fills) {
      const wide = (counts[state] / usable) * (width - 1);
      fill(state, colour, left, 4, wide, 8);
      left += wide;
    }
    context.strokeStyle = colours.hairline;
    context.strokeRect(0.5, 3.5, width - 1, 9);
    let x = 0;
    for (const [state, colour] of fills) {
      fill(state, colour, x, 20, 10, 10);
      context.strokeStyle = colours.muted;
      context.strokeRect(x + 0.5, 20.5, 9, 9);
      const label = `${formatNumber(counts[state])} ${STATES[state]}`;
      text(context, label, x + 15, 25.5, colours.text, SMALL);
      x += textWidth(context, label, SMALL) + 30;
    }
    const [at, y] = this.oneLine ? [x, 20] : [0, 20 + LINE];
    context.strokeStyle = colours.outline;
    context.lineWidth = 1.5;
    context.strokeRect(at + 0.75, y + 0.75, 8.5, 8.5);
    text(context, CHANGED, at + 15, y + 5.5, colours.muted, SMALL);
    const next = at + textWidth(context, CHANGED, SMALL) + 30;
    this.cornerMark(context, next, y, 10);
    text(context, NEXT, next + 15, y + 5.5, colours.muted, SMALL);
  }

  /** The KV cache groups with their marks and numbers of blocks. */
  drawGroups(context) {
    const { held, holes } = this.byGroup, { colours } = this.theme;
    this.store.groups.forEach((group, index) => {
      const unit = group.kind === "mamba" ? "state slot" : "block";
      const empty = holes[index] ? `, ${counted(holes[index], "hole")}` : "";
      const label = `${groupOf(group)}: ${counted(held[index], unit)}${empty}`;
      const x = (index % this.groupsPerLine) * GROUP_WIDTH,
        y = this.legendEnd + 12 + LINE * Math.floor(index / this.groupsPerLine);
      context.strokeStyle = colours.muted;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, 9, 9);
      markGroup(context, group, x, y, 10, colours.text);
      text(context, label, x + 15, y + 5.5, colours.text, SMALL);
    });
  }

  /** Mark the group of each block in use; its colour stays that of the request. */
  drawGroupMarks(context) {
    const { theme, cell, store } = this, { state } = this.pool;
    for (const [block, { group, requests: [request] }] of this.byGroup.places) {
      if (state[block] !== OWNED) continue;
      const [x, y] = this.xy(block), ink = inkOn(theme.hue(request.index) || theme.colours.owned);
      markGroup(context, store.groups[group], x, y, cell, ink);
    }
  }

  /** Fill an image with one pixel per block; the panel scales it up without smoothing. */
  paint() {
    const { theme, columns, rows, image } = this, { state, owner } = this.pool, { colours } = theme;
    if (image.width !== columns || image.height !== rows) {
      image.width = columns;
      image.height = rows;
      this.pixels = null;
    }
    const context = image.getContext("2d");
    this.pixels ||= context.createImageData(columns, rows);
    const data = new Uint32Array(this.pixels.data.buffer);
    const byState = [colours.hairline, colours.free, colours.cached, colours.owned].map(packed);
    const hues = new Map([...theme.focus.keys()].map((index) => [index, packed(theme.hue(index))]));
    for (let block = 0; block < this.shown; block++) {
      data[block] = (state[block] === OWNED && hues.get(owner[block])) || byState[state[block]];
    }
    context.putImageData(this.pixels, 0, 0);
  }

  /** The lines between neighbouring blocks. */
  drawGrid(context) {
    const { cell, top, rows } = this, last = this.inRow(rows - 1);
    context.fillStyle = this.theme.colours.hairline;
    for (let i = 1; i < this.inRow(0); i++) {
      context.fillRect(i * cell - 0.5, top, 1, (i < last ? rows : rows - 1) * cell);
    }
    for (let i = 1; i < rows; i++) context.fillRect(0, top + i * cell - 0.5, this.inRow(i) * cell, 1);
  }

  /** Hatch the evictable blocks, and mark those that several requests share. */
  drawCells(context) {
    const { theme, cell } = this, { colours } = theme, { state, owner, references } = this.pool;
    const evictable = mix(colours.cached, colours.muted, 0.4);
    for (let block = 1; block < this.shown; block++) {
      const [x, y] = this.xy(block);
      if (state[block] === CACHED && cell >= 10) hatch(context, x + 0.5, y + 0.5, cell - 1, cell - 1, evictable, 4);
      if (references[block] < 2) continue;
      if (cell >= NUMBERED) {
        const ink = inkOn(theme.hue(owner[block]) || colours.owned);
        text(context, String(references[block]), x + cell / 2, y + cell / 2 + 0.5, ink, SMALL, "center");
      } else if (cell >= DOTTED) {
        context.fillStyle = colours.outline;
        context.fillRect(x + cell / 2 - 1, y + cell / 2 - 1, 2, 2);
      }
    }
  }

  drawChanged(context) {
    const { store, cell } = this;
    context.strokeStyle = this.theme.colours.outline;
    context.lineWidth = cell >= 6 ? 1.5 : 1;
    for (const block of store.pool.changedIn(this.cursor.step)) {
      const [x, y] = this.xy(block);
      context.strokeRect(x + 0.5, y + 0.5, Math.max(1, cell - 1), Math.max(1, cell - 1));
    }
  }

  drawNextEvicted(context) {
    const [x, y] = this.xy(this.nextEvicted);
    this.cornerMark(context, x, y, this.cell * 0.6);
  }

  /** The mark of the block that is evicted next: a triangle in its corner. */
  cornerMark(context, x, y, size) {
    context.fillStyle = this.theme.colours.cursor;
    polygon(context, [[x, y], [x + size, y], [x, y + size]]);
    context.fill();
  }

  drawOverlay(context) {
    const { store, cell } = this, { hover, step } = this.cursor, { colours } = this.theme;
    if (!this.pool) return;
    const outline = (block, colour, width) => {
      const [x, y] = this.xy(block);
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(x - 1, y - 1, cell + 2, cell + 2);
    };
    if (hover.request !== undefined) {
      const request = store.requests[hover.request];
      context.setLineDash([2, 2]); // a whole line says that a block changed
      store.groups.forEach((_, group) => {
        for (const block of store.blockTable(request, step, group)) if (block) outline(block, colours.outline, 1);
      });
      context.setLineDash([]);
    }
    for (const block of new Set([hover.block, this.pinned])) if (block > 0) outline(block, colours.cursor, 2);
  }

  /** The block whose card is open. */
  get pinned() {
    return this.view.inspector?.pinned?.kind === "block" ? this.view.inspector.pinned.block : undefined;
  }

  needs(what) {
    return what === "pin" || super.needs(what);
  }

  changesPicture(what) {
    return what !== "pin" && super.changesPicture(what);
  }

  showsOverlay() {
    return this.pinned > 0 || super.showsOverlay();
  }

  // -- words -----------------------------------------------------------------------------------------------------

  hit(x, y) {
    const { pool, store } = this;
    if (!pool || y < this.top) return null;
    const column = Math.floor(x / this.cell), row = Math.floor((y - this.top) / this.cell);
    const block = row * this.columns + column;
    if (column < 0 || column >= this.columns || block >= this.shown) return null;
    if (block === 0) return { hover: { block }, lines: ["block 0", "reserved, never handed out"], block };
    const hover = { block }, lines = [`block ${block}: ${STATES[pool.state[block]]}`];
    const owned = pool.state[block] === OWNED, request = owned ? store.requests[pool.owner[block]] : undefined;
    if (request) Object.assign(hover, this.ownerHit(request, block, lines));
    const readers = readersOf(store.supplements.shadow.get(this.cursor.step), block);
    if (readers.length) {
      const first = readers.slice(0, 4).map((position) => `(${position.join(", ")})`).join(" ");
      const more = readers.length > 4 ? " …" : "";
      lines.push(`read by ${counted(readers.length, "threadgroup")} of the Metal kernel: ${first}${more}`);
    }
    if (pool.state[block] === CACHED) {
      const next = block === this.nextEvicted;
      lines.push(next ? "the next cached block to be evicted" : "can still be hit by the prefix cache");
    }
    if (pool.changed[block] >= 0) lines.push(`last changed in step ${store.label(pool.changed[block])}`);
    return { hover, lines, request, block };
  }

  /** Describe the owner of a block in `lines`; returns the rest of the hover. */
  ownerHit(request, block, lines) {
    const { store } = this, holders = holdersOf(store, block, this.cursor.step), hover = { request: request.index };
    const place = store.blocksByGroup(this.cursor.step).places.get(block);
    lines.push(`${holders.length > 1 ? "owners" : "owner"} ${listed(holders, (each) => nameOf(each)).join("")}`);
    if (!place) return hover;
    const { kind, block_size: size } = store.groups[place.group], { logical } = place;
    if (store.groups.length > 1) lines.push(`group ${place.group}: ${groupOf(store.groups[place.group])}`);
    if (kind === "mamba") {
      lines.push(`state slot ${logical}`);
      return hover;
    }
    const kv = [logical * size, (logical + 1) * size];
    lines.push(`logical block ${logical}: KV positions ${formatRange(...kv)}`);
    return { ...hover, kv };
  }

  clicked(hit) {
    this.view.inspector.pin({ kind: "block", block: hit.block, request: hit.request?.index });
  }

  describe() {
    if (!this.pool) return "";
    const { counts } = this.pool;
    return `${counts[OWNED]} blocks in use, ${counts[CACHED]} cached and evictable, ${counts[FREE]} free`;
  }

  tableData() {
    const { store, cursor } = this, pool = store.pool.at(cursor.step), rows = [], next = pool ? nextEvicted(pool) : -1;
    for (let block = 1; pool && block < pool.state.length && rows.length < TABLE_BLOCKS; block++) {
      if (pool.state[block] === FREE) continue;
      const owners = listed(holdersOf(store, block, cursor.step), (each) => nameOf(each)).join("") || "–";
      const state = block === next ? "cached, evicted next" : STATES[pool.state[block]];
      const changed = pool.changed[block] >= 0 ? store.label(pool.changed[block]) : "–";
      rows.push([block, state, owners, pool.references[block], changed]);
    }
    return {
      caption: `Blocks that are not free at step ${store.label(cursor.step)}`,
      headings: ["block", "state", "owners", "references", "last change"],
      rows,
    };
  }
}

/** The cached block that has been free for the longest time; -1 for none. */
function nextEvicted({ state, freed }) {
  let next = -1;
  for (let block = 1; block < state.length; block++) {
    if (state[block] === CACHED && (next < 0 || freed[block] < freed[next])) next = block;
  }
  return next;
}

/** The mark of a KV cache group in a cell: a bar for a window, a diamond for a state, nothing for full attention. */
function markGroup(context, { kind }, x, y, size, ink) {
  context.fillStyle = ink;
  if (kind === "sliding_window") context.fillRect(x + 1, y + 1, Math.max(1, size * 0.2), size - 2);
  if (kind !== "mamba") return;
  const cx = x + size / 2, cy = y + size / 2, r = size * 0.3;
  polygon(context, [[cx - r, cy], [cx, cy - r], [cx + r, cy], [cx, cy + r]]);
  context.fill();
}

/** A #RRGGBB colour as a pixel of an image. */
function packed(colour) {
  const [red, green, blue] = channels(colour);
  return 0xff000000 | (blue << 16) | (green << 8) | red;
}

// Block tables: the logical blocks of each scheduled request in order, with their physical ids.

import { counted, formatRange, replace } from "./dom.js";
import { MONO, requestLabel, SMALL, text } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { nameOf } from "./request.js";
import { withTerms } from "./terms.js";
import { inkOn } from "./theme.js";
import { groupOf } from "./words.js";

const LEFT = 84, ROW = 18, TOP = 20, MAX_ROWS = 16;

/** Pixels of a digit of an id, and those around it. */
const DIGIT = 6.1, AROUND = 3;

const IDS = "physical block ids", NO_IDS = "physical blocks, whose ids a click tells";
const FILLED = "each filled as far as it is used; at the end, used slots of the last one";

/**
 * The block tables of a request at a step, one for each KV cache group: its places in logical order, each with the
 * physical `block` (0 if none is held), its `slots`, and the number of them that are `filled`.
 */
function tablesOf(store, step, chunk) {
  return store.groups.map((group, index) => {
    const isState = group.kind === "mamba", slots = isState ? 1 : group.block_size;
    const filled = (logical) => isState ? 1 : Math.max(0, Math.min(slots, chunk.end - logical * slots));
    const blocks = store.blockTable(chunk.request, step, index);
    const places = blocks.map((block, logical) => ({ logical, block, slots, filled: block ? filled(logical) : 0 }));
    return { chunk, group, index, blocks, places, name: store.groups.length > 1 ? groupOf(group) : "" };
  });
}

export class BlockTablesPanel extends CanvasPanel {
  constructor(view) {
    super(view, {
      id: "tables",
      title: "Block tables",
      hint: `${IDS}, ${FILLED}`,
      height: 120,
    });
    this.rows = [];
    this.numbered = true; // whether the ids fit into the blocks
  }

  /** The chunks to show; when there are too many, those of requests in focus come first. */
  layout() {
    const { store, cursor, theme } = this;
    const numGroups = Math.max(1, store.groups.length), most = Math.max(1, Math.floor(MAX_ROWS / numGroups));
    let chunks = store.numSteps ? store.chunks(cursor.step) : [];
    this.hidden = Math.max(0, chunks.length - most);
    if (this.hidden) {
      const inFocus = (chunk) => theme.focus.has(chunk.request.index);
      chunks = [...chunks.filter(inFocus), ...chunks.filter((chunk) => !inFocus(chunk))].slice(0, most);
    }
    this.rows = chunks.flatMap((chunk) => tablesOf(store, cursor.step, chunk));
    this.setHeight(TOP + Math.max(2, this.rows.length) * ROW + (this.hidden ? 18 : 6));
    const longest = Math.max(1, ...this.rows.map((row) => row.blocks.length));
    const space = this.width - LEFT - (longest * 4 > this.width - LEFT - 54 ? 84 : 54) - (numGroups > 1 ? 80 : 0);
    this.cell = Math.max(4, Math.min(30, space / longest));
    this.fits = Math.max(1, Math.floor(space / this.cell + 1e-6));
    const digits = String(Math.max(0, ...this.rows.flatMap((row) => row.blocks))).length;
    const numbered = digits * DIGIT + AROUND <= this.blockWidth;
    if (numbered !== this.numbered) replace(this.hintElement, withTerms(`${numbered ? IDS : NO_IDS}, ${FILLED}`));
    this.numbered = numbered;
  }

  get blockWidth() {
    return this.cell - (this.cell > 8 ? 2 : 1);
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

  drawRow(context, row, y) {
    const { theme, cell } = this, { colours } = theme, { chunk, places, group, name } = row;
    if (row.index === 0) requestLabel(context, theme, chunk.request, LEFT - 8, y + ROW / 2);
    const hue = theme.hue(chunk.request.index) || colours.owned;
    const width = this.blockWidth, height = ROW - 5, shown = places.slice(0, this.fits);
    shown.forEach(({ logical, block, filled, slots }) => {
      const x = LEFT + logical * cell, share = filled / slots;
      if (!block) { // a place that is not held: a hole
        context.strokeStyle = colours.muted;
        context.setLineDash([2, 2]);
        context.strokeRect(x + 0.5, y + 2.5, width - 1, height - 1);
        context.setLineDash([]);
        return;
      }
      context.fillStyle = colours.kv;
      context.fillRect(x, y + 2, width, height);
      context.fillStyle = hue;
      context.fillRect(x, y + 2 + height * (1 - share), width, height * share);
      if (!this.numbered) return;
      const ink = share > 0.6 ? inkOn(hue) : colours.text;
      text(context, String(block), x + width / 2, y + 2 + height / 2 + 0.5, ink, MONO, "center");
    });
    const more = places.length > shown.length ? `… ${places.length}: ` : "", last = places.at(-1);
    const fill = last && group.kind !== "mamba" ? `${last.filled}/${last.slots}` : "";
    const label = [`${more}${fill}`, name].filter(Boolean).join(" ");
    text(context, label, LEFT + shown.length * cell + 4, y + ROW / 2, colours.muted, SMALL);
  }

  drawOverlay(context) {
    const { hover } = this.cursor, { colours } = this.theme;
    this.rows.forEach(({ chunk, places }, row) => {
      const y = TOP + row * ROW;
      if (hover.request === chunk.request.index) {
        context.strokeStyle = colours.outline;
        context.lineWidth = 1;
        context.strokeRect(1.5, y + 0.5, this.width - 3, ROW - 2);
      }
      places.slice(0, this.fits).forEach(({ logical, block }) => {
        if (!block || block !== hover.block) return;
        context.strokeStyle = colours.cursor;
        context.lineWidth = 2;
        context.strokeRect(LEFT + logical * this.cell - 1, y + 1, this.cell, ROW - 3);
      });
    });
  }

  hit(x, y) {
    const row = this.rows[Math.floor((y - TOP) / ROW)];
    if (!row || y < TOP) return null;
    const { places, chunk, group, name } = row, { request } = chunk, size = group.block_size;
    const logical = Math.floor((x - LEFT) / this.cell), id = nameOf(request);
    if (x < LEFT || logical >= Math.min(this.fits, places.length)) {
      return {
        hover: { request: request.index },
        lines: [id, [counted(places.length, "block"), name].filter(Boolean).join(", ")],
        request,
      };
    }
    const { block, filled } = places[logical], kv = [logical * size, (logical + 1) * size];
    const first = [`${id}: logical block ${logical}`, name].filter(Boolean).join(", ");
    if (!block) {
      const why = group.kind === "mamba" ? "no state is kept here" : "behind the window: its block was given back";
      return { hover: { request: request.index }, request, lines: [first, why] };
    }
    const used = `${filled} of ${size} slots used`;
    return {
      hover: { request: request.index, block, kv },
      request,
      block,
      lines: [
        first,
        `physical block ${block}`,
        group.kind === "mamba" ? "a recurrent state" : `KV positions ${formatRange(...kv)}, ${used}`,
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
      headings: ["request", "group", "blocks", "physical ids in logical order"],
      rows: chunks.flatMap((chunk) => tablesOf(store, cursor.step, chunk)).map(({ chunk, group, places }) => {
        return [nameOf(chunk.request), groupOf(group), places.length, places.map(({ block }) => block).join(" ")];
      }),
    };
  }
}

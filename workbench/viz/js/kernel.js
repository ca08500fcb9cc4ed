// The attention kernel: what each work item, or each threadgroup of a recorded launch, computes and reads.

import { counted, formatNumber, formatRange, h, plain, select, setText } from "./dom.js";
import { hatch, MONO, SMALL, text, tickLabels, ticksIn } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { askForKernelRun } from "./kernel_page.js";
import { nameOf } from "./request.js";
import { shadowFacts, threadgroupsOf } from "./shadow.js";
import { bytesPerPosition, fieldsOf, formatBytes, workOf, workTotals } from "./work.js";

const LEFT = 84, TOP = 20, GAUGE = 56, BYTES = 52, MAX_ROWS = 240;

const ITEMS_HINT = "a row per work item: its query rows and its KV";
const THREADGROUPS_HINT = "a row per threadgroup: its rows and KV blocks";

/** Names of the backends that are not their words. */
const BACKENDS = { cpu: "CPU", cuda: "CUDA", metal: "Metal" };

export class KernelPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "kernel", title: "Attention work list", hint: ITEMS_HINT, height: 160 });
    this.summary = h("p", { class: "wb-facts" });
    this.body.prepend(this.summary);
    const rows = [["threadgroups", "Metal threadgroups"], ["items", "work items"]];
    this.choice = select("Rows", rows, () => this.redraw());
    this.choice.hidden = true;
    const title = "Run this step's attention through the Metal source on the emulator, and compare the results";
    const props = { class: "wb-quiet", type: "button", hidden: true, title, onclick: () => this.check() };
    this.checkButton = h("button", props, "Check on Metal");
    this.tools.append(this.checkButton, this.choice);
  }

  layout() {
    const { store, cursor } = this;
    if (!store.numSteps) return;
    this.chunks = store.chunks(cursor.step);
    this.work = workOf(store, cursor.step);
    const shadow = store.supplements.shadow.get(cursor.step), threadgroups = threadgroupsOf(shadow);
    this.choice.hidden = !threadgroups;
    this.checkButton.hidden = !this.view.can("shadow") || Boolean(shadow) || cursor.step !== cursor.last;
    this.launched = threadgroups && this.choice.value === "threadgroups" ? { threadgroups, shadow } : null;
    if (this.launched) {
      this.work = { ...this.work, items: distinctItems(threadgroups), blockQ: shadow.block_q, source: "shadow" };
    }
    setText(this.hintElement, this.launched ? THREADGROUPS_HINT : ITEMS_HINT);
    this.nameGroup();
    this.totals = workTotals(this.work, this.chunks, store.window(cursor.step));
    // A row is a work item; a threadgroup also has a position in the grid, the blocks it read, and their bytes.
    this.allRows = this.launched ? threadgroups : this.work.items.map((item, index) => ({ index, item }));
    this.rows = this.allRows.slice(0, MAX_ROWS);
    const count = Math.max(1, this.rows.length);
    this.row = Math.max(2, Math.min(14, 260 / count));
    this.setHeight(TOP + count * this.row + 22);
    this.most = Math.max(16, ...this.work.items.map((item) => item.kv_end));
    const space = this.width - LEFT - GAUGE - 32 - (this.launched ? BYTES : 0);
    this.x = (kv) => LEFT + GAUGE + 16 + (kv / this.most) * space;
  }

  /** Ask for a shadow launch of the newest step: the answer is told, and its threadgroups become the rows. */
  check() {
    const { store, cursor, view } = this;
    view.send("shadow", { step: store.label(cursor.step) });
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(context, width) {
    const { theme, work, chunks } = this, { colours } = theme;
    if (!work?.items.length) return text(context, "No attention in this step.", LEFT, 10, colours.muted);
    setText(this.summary, this.facts().join(". "));
    this.drawHeadings(context, width);
    const bottom = TOP + this.rows.length * this.row;
    const values = ticksIn(context, this.most, this.x(this.most) - this.x(0), 6);
    context.fillStyle = colours.hairline;
    for (const value of values) context.fillRect(this.x(value), TOP, 1, bottom - TOP);
    tickLabels(context, values, this.x, bottom + 10, colours.muted);
    const height = Math.max(1, this.row - (this.row > 4 ? 2 : 0.5)), readable = this.row >= 9;
    let previous = -1, lastLabel = -99;
    this.rows.forEach((row, i) => {
      const { item } = row, y = TOP + i * this.row, chunk = chunks[item.seq], fill = theme.fill(chunk);
      this.drawGauge(context, item, y, height, fill);
      this.drawKv(context, row, y, height, fill);
      if (row.bytes !== undefined && readable) {
        text(context, formatBytes(row.bytes), width - 4, y + height / 2, colours.muted, SMALL, "right");
      }
      if (item.seq !== previous && (readable || y - lastLabel >= 10)) {
        text(context, chunk.request.label, LEFT - 8, y + height / 2, colours.text, MONO, "right");
        lastLabel = y;
      }
      previous = item.seq;
    });
  }

  drawHeadings(context, width) {
    const { muted } = this.theme.colours, y = TOP - 9;
    text(context, "rows used", LEFT, y, muted, SMALL);
    const kv = this.launched ? "KV blocks read, by position in the context" : "KV positions read";
    text(context, kv, LEFT + GAUGE + 16, y, muted, SMALL);
    if (this.launched) text(context, "K and V", width - 4, y, muted, SMALL, "right");
  }

  /** Query rows of an item, in a frame as wide as the rows its tile has room for. */
  drawGauge(context, item, y, height, fill) {
    const used = (item.num_rows / this.work.blockQ) * GAUGE;
    context.fillStyle = fill;
    context.fillRect(LEFT, y, Math.max(1, used), height);
    if (used >= GAUGE || height < 4) return;
    context.strokeStyle = this.theme.colours.hairline;
    context.lineWidth = 1;
    context.strokeRect(LEFT + used + 0.5, y + 0.5, GAUGE - used - 1, height - 1);
  }

  drawKv(context, row, y, height, fill) {
    const { item } = row;
    context.fillStyle = fill;
    for (const [from, to] of this.spans(row)) {
      context.fillRect(this.x(from), y, Math.max(1, this.x(to) - this.x(from) - 1), height);
    }
    if (item.num_splits < 2 || height < 6) return;
    const x = this.x(item.kv_start), width = this.x(item.kv_end) - x - 1;
    hatch(context, x, y, width, height, this.theme.colours.background, 6);
  }

  /** KV positions [from, to) that a row read: those of its blocks if they were recorded, else those of its item. */
  spans({ item, blocks }) {
    if (!blocks) return [[item.kv_start, item.kv_end]];
    const size = this.store.facts.block_size, read = new Set(blocks), result = [];
    this.store.blockTable(this.chunks[item.seq].request, this.cursor.step).forEach((block, logical) => {
      const from = Math.max(item.kv_start, logical * size), to = Math.min(item.kv_end, (logical + 1) * size);
      if (read.has(block) && to > from) result.push([from, to]);
    });
    return result;
  }

  drawOverlay(context, width) {
    const { hover } = this.cursor, { cursor: colour } = this.theme.colours;
    (this.rows || []).forEach((row, i) => {
      const { item } = row, y = TOP + i * this.row, reads = this.readsHovered(row);
      if (hover.item !== row.index && !reads) return;
      context.strokeStyle = colour;
      context.lineWidth = 1.5;
      context.strokeRect(LEFT - 2, y - 1, width - LEFT - 8, this.row);
      if (!reads) return;
      const from = this.x(Math.max(item.kv_start, hover.kv[0])), to = this.x(Math.min(item.kv_end, hover.kv[1]));
      context.fillStyle = colour;
      context.fillRect(from, y, Math.max(2, to - from), Math.max(1, this.row - 2));
    });
  }

  /** Whether a row reads the hovered KV positions of its sequence. */
  readsHovered({ item, blocks }) {
    const { hover } = this.cursor;
    if (hover.request !== this.chunks[item.seq].request.index || !hover.kv) return false;
    if (blocks && hover.block > 0) return blocks.includes(hover.block);
    return item.kv_start < hover.kv[1] && item.kv_end > hover.kv[0];
  }

  // -- words -----------------------------------------------------------------------------------------------------

  facts() {
    const { work, totals } = this, hidden = this.allRows.length - this.rows.length;
    const ratio = totals.least ? totals.read / totals.least : 1;
    const splits = work.items.some((item) => item.num_splits > 1);
    const rows = `${counted(totals.rows, "query row")} used, ${formatNumber(totals.slots - totals.rows)} idle`;
    const kv = `KV read ${ratio.toFixed(2)} × the minimum${this.bytes()}`;
    return [
      `${this.source()}${hidden ? `, the first ${this.rows.length} are drawn` : ""}`,
      `${rows} · ${kv}${splits ? " · hatched: split over KV and merged afterwards" : ""}`,
      this.expanded(),
      shadowFacts(this.store.supplements.shadow.get(this.cursor.step), this.launched),
    ].filter(Boolean);
  }

  /** The rows whose latents were expanded to keys and values before the launch. */
  expanded() {
    const { expanded_rows: rows, expanded_sequences: chunks } = this.work.launch?.details ?? {};
    if (!rows || this.launched) return "";
    return `latents expanded for ${counted(rows, "query row")} of ${counted(chunks, "chunk")}`;
  }

  /** The origin of the rows. */
  source() {
    const { work, launched } = this, { launch } = work, items = counted(work.items.length, "work item");
    if (launched) {
      const threadgroups = `${counted(launched.threadgroups.length, "threadgroup")} for ${items}`;
      const shadow = `shadow launch of the Metal kernel on layer ${launched.shadow.layer}`;
      return `${threadgroups}, one per item and KV head, in a ${shadow}`;
    }
    const grid = launch?.grid?.length
      ? `, grid ${launch.grid.join(" × ")} threads, threadgroup ${launch.threadgroup.join(" × ")}`
      : "";
    const from = work.source === "launch"
      ? `(measured, ${BACKENDS[launch.backend] ?? plain(launch.backend, 24)})`
      : `(planned with ${work.blockQ} query rows per item: no launch was recorded)`;
    return `${items} ${from}${grid}`;
  }

  /** Bytes read and the fewest possible, when the size of a position is known. */
  bytes() {
    const { totals, launched } = this, size = bytesPerPosition(this.work.launch);
    if (!size) return "";
    const read = launched ? launched.threadgroups.reduce((sum, row) => sum + row.bytes, 0) : totals.read * size;
    return `, ${formatBytes(read)} against ${formatBytes(totals.least * size)} per layer`;
  }

  hit(_x, y) {
    const row = this.rows?.[Math.floor((y - TOP) / this.row)];
    if (!row || y < TOP) return null;
    const { item, position } = row, { request } = this.chunks[item.seq], id = nameOf(request);
    const title = position
      ? `threadgroup (${position.join(", ")}): work item ${row.itemIndex}, ${id}`
      : `work item ${row.index}: ${id}`;
    const rows = `query rows [${item.q_start}, ${item.q_start + item.num_rows})`;
    const split = item.num_splits > 1 ? `, split ${item.split + 1} of ${item.num_splits}` : "";
    return {
      hover: { request: request.index, item: row.index, kv: [item.kv_start, item.kv_end] },
      request,
      row,
      lines: [
        title,
        `${rows}, ${item.num_rows} of ${this.work.blockQ} used`,
        `KV ${formatRange(item.kv_start, item.kv_end)}${split}`,
        this.blocksLine(row, request),
        ...(this.canRecord() ? ["click: step through its threadgroup in the kernel lab"] : []),
      ],
    };
  }

  canRecord() {
    return this.view.can("kernel_run") && this.work.source !== "plan";
  }

  blocksLine({ item, blocks, bytes }, request) {
    const size = this.store.facts.block_size || 1;
    const first = Math.floor(item.kv_start / size), last = Math.ceil(item.kv_end / size);
    const ids = blocks || this.store.blockTable(request, this.cursor.step).slice(first, last);
    const read = blocks ? ` read, ${formatBytes(bytes)} of K and V` : "";
    return `${counted(ids.length, "block")}${read}: ${ids.slice(0, 12).join(" ")}${ids.length > 12 ? " …" : ""}`;
  }

  clicked(hit) {
    this.cursor.select(hit.request.index);
    const { row } = hit, [, head = 0] = row.position ?? [];
    const heads = this.work.launch?.num_kv_heads || 1;
    if (this.launched) askForKernelRun(this.view, row.itemIndex, head % heads);
    else if (this.work.source === "launch") askForKernelRun(this.view, fieldsOf(row.item), 0);
  }

  describe() {
    return this.work ? this.facts().join("; ") : "";
  }

  tableData() {
    this.layout();
    const { work, launched, chunks } = this;
    const cells = (item) => {
      const id = nameOf(chunks[item.seq].request), split = `${item.split + 1}/${item.num_splits}`;
      return [id, item.q_start, item.num_rows, work.blockQ, item.kv_start, item.kv_end, split];
    };
    const headings = ["item", "request", "q from", "rows", "rows of tile", "KV from", "KV to", "split"];
    const caption = work ? this.facts().join(" · ") : "";
    if (!launched) return { caption, headings, rows: (work?.items || []).map((item, i) => [i, ...cells(item)]) };
    return {
      caption,
      headings: ["threadgroup", ...headings, "blocks read", "bytes"],
      rows: launched.threadgroups.map(({ position, itemIndex, item, blocks, bytes }) => {
        return [`(${position.join(", ")})`, itemIndex, ...cells(item), blocks.join(" "), bytes];
      }),
    };
  }
}

/** The work items of some threadgroups, each once. */
function distinctItems(threadgroups) {
  return [...new Map(threadgroups.map((row) => [row.itemIndex, row.item])).values()];
}

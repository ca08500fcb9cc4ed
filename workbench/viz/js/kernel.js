// The attention kernel: what each work item, or each threadgroup of a real launch, computes and reads.

import { formatNumber, h, plain, setText } from "./dom.js";
import { MONO, SMALL, hatch, text, ticks } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { bytesPerPosition, formatBytes, shadowFacts, threadgroupsOf, workOf, workTotals } from "./work.js";

const LEFT = 84, TOP = 20, GAUGE = 56, BYTES = 52, MAX_ROWS = 240;

export class KernelPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "kernel", title: "Attention work list", hint: "one row per work item: its query rows and the KV it reads", height: 160 });
    this.summary = h("p", { class: "wb-facts" });
    this.body.prepend(this.summary);
    this.choice = h("select", { class: "wb-button", hidden: true, "aria-label": "Rows", onchange: () => { this.stale.add("data"); this.view.requestFrame(); } },
      h("option", { value: "threadgroups" }, "Metal threadgroups"), h("option", { value: "items" }, "work items"));
    this.tools.append(this.choice);
  }

  base(what) { return what !== "hover"; }

  layout() {
    const { store, cursor } = this;
    if (!store.numSteps) return;
    this.chunks = store.chunks(cursor.step);
    const shadow = store.shadows.get(cursor.step), threadgroups = threadgroupsOf(shadow);
    this.choice.hidden = !threadgroups;
    this.work = workOf(store, cursor.step);
    this.launched = threadgroups && this.choice.value === "threadgroups" ? { threadgroups, shadow } : null;
    if (this.launched) this.work = { ...this.work, items: distinctItems(threadgroups), blockQ: shadow.block_q, source: "shadow" };
    setText(this.hintElement, this.launched ? "one row per threadgroup: its query rows and the KV blocks it read" : "one row per work item: its query rows and the KV it reads");
    this.totals = workTotals(this.work, this.chunks, this.work.launch?.windows?.[0] ?? -1);
    // A row is a work item, and in a launch that was traced also a KV head, the blocks read and their bytes.
    this.rows = (this.launched ? threadgroups : this.work.items.map((item, i) => ({ index: i, item }))).slice(0, MAX_ROWS);
    const count = this.rows.length;
    this.row = Math.max(2, Math.min(14, 260 / Math.max(1, count)));
    this.setHeight(TOP + Math.max(1, count) * this.row + 22);
    this.most = Math.max(16, ...this.work.items.map((item) => item.kv_end));
    const space = this.width - LEFT - GAUGE - 32 - (this.launched ? BYTES : 0);
    this.x = (kv) => LEFT + GAUGE + 16 + (kv / this.most) * space;
  }

  draw(context, width) {
    const { theme, work, chunks } = this, colours = theme.colours;
    if (!work || !work.items.length) return text(context, "No attention in this step.", LEFT, 10, colours.muted);
    setText(this.summary, this.facts().join(". "));
    const bottom = TOP + this.rows.length * this.row;
    text(context, "rows used", LEFT, TOP - 9, colours.muted, { font: SMALL });
    text(context, this.launched ? "KV blocks read, at their place in the context" : "KV positions read", LEFT + GAUGE + 16, TOP - 9, colours.muted, { font: SMALL });
    if (this.launched) text(context, "K and V", width - 4, TOP - 9, colours.muted, { align: "right", font: SMALL });
    for (const tick of ticks(0, this.most, 6, true)) {
      context.fillStyle = colours.hairline;
      context.fillRect(this.x(tick), TOP, 1, bottom - TOP);
      text(context, formatNumber(tick), this.x(tick), bottom + 10, colours.muted, { align: tick ? "center" : "left", font: SMALL });
    }
    let previous = -1, lastLabel = -99;
    this.rows.forEach((row, i) => {
      const { item } = row, y = TOP + i * this.row, high = Math.max(1, this.row - (this.row > 4 ? 2 : 0.5)), chunk = chunks[item.seq];
      const fill = chunk.decode ? theme.decode(chunk.request.index) : theme.prefill(chunk.request.index);
      this.drawGauge(context, item, y, high, fill);
      this.drawKv(context, row, y, high, fill);
      if (row.bytes !== undefined && this.row >= 9) text(context, formatBytes(row.bytes), width - 4, y + high / 2, colours.muted, { align: "right", font: SMALL });
      if (item.seq !== previous && (this.row >= 9 || y - lastLabel >= 10)) {
        text(context, plain(chunk.request.id, 11), LEFT - 8, y + high / 2, colours.text, { align: "right", font: MONO });
        lastLabel = y;
      }
      previous = item.seq;
    });
  }

  /** Query rows of the item, of as many as its tile has. */
  drawGauge(context, item, y, high, fill) {
    const used = (item.num_rows / this.work.blockQ) * GAUGE;
    context.fillStyle = fill;
    context.fillRect(LEFT, y, Math.max(1, used), high);
    if (used >= GAUGE || high < 4) return;
    context.strokeStyle = this.theme.colours.hairline;
    context.lineWidth = 1;
    context.strokeRect(LEFT + used + 0.5, y + 0.5, GAUGE - used - 1, high - 1);
  }

  drawKv(context, row, y, high, fill) {
    const { item } = row;
    context.fillStyle = fill;
    for (const [from, to] of this.spans(row)) context.fillRect(this.x(from), y, Math.max(1, this.x(to) - this.x(from) - 1), high);
    if (item.num_splits > 1 && high >= 6) hatch(context, this.x(item.kv_start), y, this.x(item.kv_end) - this.x(item.kv_start) - 1, high, this.theme.colours.background, 6);
  }

  /** KV positions [from, to) that a row read: of its blocks where they were traced, of its work item where not. */
  spans({ item, blocks }) {
    if (!blocks) return [[item.kv_start, item.kv_end]];
    const { store } = this, size = store.facts.block_size, table = store.blockTable(this.chunks[item.seq].request, this.cursor.step);
    const read = new Set(blocks);
    return table.flatMap((block, logical) => (read.has(block) ? [[Math.max(item.kv_start, logical * size), Math.min(item.kv_end, (logical + 1) * size)]] : [])).filter(([from, to]) => to > from);
  }

  facts() {
    const { work, totals, launched } = this, launch = work.launch, size = bytesPerPosition(launch);
    const idle = totals.slots - totals.rows, splits = work.items.some((item) => item.num_splits > 1);
    const ratio = totals.least ? totals.read / totals.least : 1;
    const hidden = (launched ? launched.threadgroups.length : work.items.length) - this.rows.length;
    const rows = `${formatNumber(totals.rows)} query rows used, ${formatNumber(idle)} idle · KV read ${ratio.toFixed(2)} × the minimum${this.bytes(size)}${splits ? " · hatched: split over KV, merged after" : ""}`;
    return [`${this.source()}${hidden ? `, the first ${this.rows.length} of them drawn` : ""}`, rows, shadowFacts(this.store.shadows.get(this.cursor.step), launched)].filter(Boolean);
  }

  /** Where the rows come from, in words. */
  source() {
    const { work, launched } = this, launch = work.launch;
    if (launched) return `${formatNumber(launched.threadgroups.length)} threadgroups for ${formatNumber(work.items.length)} work items, each once for every KV head, as the Metal kernel ran on layer ${launched.shadow.layer} beside the step (shadow launch)`;
    const grid = launch?.grid?.length ? `, grid ${launch.grid.join(" × ")} threads, threadgroup ${launch.threadgroup.join(" × ")}` : "";
    const from = work.source === "launch" ? `from the launch of backend ${plain(launch.backend, 24)}` : `planned, ${work.blockQ} query rows per item: no launch was recorded`;
    return `${formatNumber(work.items.length)} work items, ${from}${grid}`;
  }

  bytes(size) {
    const { totals, launched } = this;
    if (!size) return "";
    const read = launched ? launched.threadgroups.reduce((sum, row) => sum + row.bytes, 0) : totals.read * size;
    return `, ${formatBytes(read)} against ${formatBytes(totals.least * size)} per layer`;
  }

  drawOverlay(context, width) {
    const { chunks, cursor, theme } = this, { hover } = cursor;
    (this.rows || []).forEach((row, i) => {
      const { item } = row, y = TOP + i * this.row;
      const same = hover.request === chunks[item.seq].request.index;
      const reads = same && hover.kv && (row.blocks && hover.block > 0 ? row.blocks.includes(hover.block) : item.kv_start < hover.kv[1] && item.kv_end > hover.kv[0]);
      if (hover.item !== row.index && !reads) return;
      context.strokeStyle = theme.colours.cursor;
      context.lineWidth = 1.5;
      context.strokeRect(LEFT - 2, y - 1, width - LEFT - 8, this.row);
      if (reads) {
        const from = this.x(Math.max(item.kv_start, hover.kv[0]));
        context.fillStyle = theme.colours.cursor;
        context.fillRect(from, y, Math.max(2, this.x(Math.min(item.kv_end, hover.kv[1])) - from), Math.max(1, this.row - 2));
      }
    });
  }

  hit(x, y) {
    const { work, chunks, store } = this;
    const row = this.rows?.[Math.floor((y - TOP) / this.row)];
    if (!row || y < TOP) return null;
    const { item } = row, chunk = chunks[item.seq], size = store.facts.block_size || 1;
    const blocks = row.blocks || store.blockTable(chunk.request, this.cursor.step).slice(Math.floor(item.kv_start / size), Math.ceil(item.kv_end / size));
    const title = row.position ? `threadgroup (${row.position.join(", ")}): work item ${row.itemIndex}, ${plain(chunk.request.id)}` : `work item ${row.index}: ${plain(chunk.request.id)}`;
    return {
      hover: { request: chunk.request.index, item: row.index, kv: [item.kv_start, item.kv_end] }, request: chunk.request,
      lines: [title, `query rows [${item.q_start}, ${item.q_start + item.num_rows}), ${item.num_rows} of ${work.blockQ} used`,
        `KV [${formatNumber(item.kv_start)}, ${formatNumber(item.kv_end)})${item.num_splits > 1 ? `, split ${item.split + 1} of ${item.num_splits}` : ""}`,
        `${blocks.length} blocks${row.blocks ? ` read, ${formatBytes(row.bytes)} of K and V` : ""}: ${blocks.slice(0, 12).join(" ")}${blocks.length > 12 ? " …" : ""}`],
    };
  }

  clicked(hit) { this.cursor.select(hit.request.index); }

  describe() { return this.work ? this.facts().join("; ") : ""; }

  tableTwin() {
    this.layout();
    const { launched } = this;
    const common = (item) => [plain(this.chunks[item.seq].request.id), item.q_start, item.num_rows, this.work.blockQ, item.kv_start, item.kv_end, `${item.split + 1}/${item.num_splits}`];
    return {
      caption: this.work ? this.facts().join(" · ") : "",
      headings: [...(launched ? ["threadgroup", "item"] : ["item"]), "request", "q from", "rows", "of", "KV from", "KV to", "split", ...(launched ? ["blocks read", "bytes"] : [])],
      rows: launched ? launched.threadgroups.map((row) => [`(${row.position.join(", ")})`, row.itemIndex, ...common(row.item), row.blocks.join(" "), row.bytes])
        : (this.work?.items || []).map((item, i) => [i, ...common(item)]),
    };
  }
}

/** The work items of some threadgroups, each once. */
function distinctItems(threadgroups) {
  return [...new Map(threadgroups.map((row) => [row.itemIndex, row.item])).values()];
}

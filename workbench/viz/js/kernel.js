// (g) The attention kernel: what each work item computes and reads.

import { formatNumber, h, plain, setText } from "./dom.js";
import { CanvasPanel, MONO, SMALL, hatch, text, ticks } from "./panel.js";
import { bytesPerPosition, formatBytes, shadowFacts, workOf, workTotals } from "./work.js";

const LEFT = 84, TOP = 20, GAUGE = 56;

export class KernelPanel extends CanvasPanel {
  constructor(view) {
    super(view, { id: "kernel", title: "Attention work list", hint: "one row per work item: its query rows and the KV it reads", height: 160 });
    this.summary = h("p", { class: "wb-facts" });
    this.body.prepend(this.summary);
  }

  base(what) { return what !== "hover"; }

  layout() {
    const { store, cursor } = this;
    if (!store.numSteps) return;
    this.chunks = store.chunks(cursor.step);
    this.work = workOf(store, cursor.step);
    const window = this.work.launch?.windows?.[0] ?? -1;
    this.totals = workTotals(this.work, this.chunks, window);
    const count = this.work.items.length;
    this.row = Math.max(2, Math.min(14, 260 / Math.max(1, count)));
    this.setHeight(TOP + Math.max(1, count) * this.row + 22);
    const most = Math.max(16, ...this.work.items.map((item) => item.kv_end));
    this.most = most;
    this.x = (kv) => LEFT + GAUGE + 16 + (kv / most) * (this.width - LEFT - GAUGE - 32);
  }

  draw(context, width) {
    const { theme, work, chunks, totals } = this, colours = theme.colours;
    if (!work || !work.items.length) return text(context, "No attention in this step.", LEFT, 10, colours.muted);
    setText(this.summary, this.facts().join(". "));
    const bottom = TOP + work.items.length * this.row;
    text(context, "rows used", LEFT, TOP - 9, colours.muted, { font: SMALL });
    text(context, "KV positions read", LEFT + GAUGE + 16, TOP - 9, colours.muted, { font: SMALL });
    for (const tick of ticks(0, this.most, 6, true)) {
      context.fillStyle = colours.hairline;
      context.fillRect(this.x(tick), TOP, 1, bottom - TOP);
      text(context, formatNumber(tick), this.x(tick), bottom + 10, colours.muted, { align: tick ? "center" : "left", font: SMALL });
    }
    let previous = -1;
    work.items.forEach((item, i) => {
      const y = TOP + i * this.row, high = Math.max(1, this.row - (this.row > 4 ? 2 : 0.5)), chunk = chunks[item.seq];
      const fill = chunk.decode ? theme.decode(chunk.request.index) : theme.prefill(chunk.request.index);
      const used = (item.num_rows / work.blockQ) * GAUGE;
      context.fillStyle = fill;
      context.fillRect(LEFT, y, Math.max(1, used), high);
      if (used < GAUGE) {
        context.strokeStyle = colours.hairline;
        context.lineWidth = 1;
        if (high >= 4) context.strokeRect(LEFT + used + 0.5, y + 0.5, GAUGE - used - 1, high - 1);
      }
      context.fillStyle = fill;
      context.fillRect(this.x(item.kv_start), y, Math.max(1, this.x(item.kv_end) - this.x(item.kv_start) - 1), high);
      if (item.num_splits > 1 && high >= 6) hatch(context, this.x(item.kv_start), y, this.x(item.kv_end) - this.x(item.kv_start) - 1, high, colours.background, 6);
      if (item.seq !== previous && (this.row >= 9 || (y - (this.lastLabel ?? -99) >= 10))) {
        text(context, plain(chunk.request.id, 11), LEFT - 8, y + high / 2, colours.text, { align: "right", font: MONO });
        this.lastLabel = y;
      }
      previous = item.seq;
    });
    this.lastLabel = undefined;
  }

  facts() {
    const { work, totals } = this, launch = work.launch, size = bytesPerPosition(launch);
    const source = work.source === "launch" ? `from the launch of backend ${plain(launch.backend, 24)}` : `planned, ${work.blockQ} query rows per item: no launch was recorded`;
    const idle = totals.slots - totals.rows, splits = work.items.some((item) => item.num_splits > 1);
    const ratio = totals.least ? totals.read / totals.least : 1;
    const bytes = size ? `, ${formatBytes(totals.read * size)} against ${formatBytes(totals.least * size)} per layer` : "";
    const grid = launch?.grid?.length ? `, grid ${launch.grid.join(" × ")} threads, threadgroup ${launch.threadgroup.join(" × ")}` : "";
    return [`${formatNumber(work.items.length)} work items, ${source}${grid}`,
      `${formatNumber(totals.rows)} query rows used, ${formatNumber(idle)} idle · KV read ${ratio.toFixed(2)} × the minimum${bytes}${splits ? " · hatched: split over KV, merged after" : ""}`, shadowFacts(this.store.shadows.get(this.cursor.step))].filter(Boolean);
  }

  drawOverlay(context, width) {
    const { work, chunks, cursor, theme } = this;
    if (!work) return;
    work.items.forEach((item, i) => {
      const y = TOP + i * this.row, chunk = chunks[item.seq], hover = cursor.hover;
      const reads = hover.kv && hover.request === chunk.request.index && item.kv_start < hover.kv[1] && item.kv_end > hover.kv[0];
      if (hover.item !== i && !reads) return;
      context.strokeStyle = theme.colours.cursor;
      context.lineWidth = 1.5;
      context.strokeRect(LEFT - 2, y - 1, width - LEFT - 8, this.row);
      if (reads) {
        context.fillStyle = theme.colours.cursor;
        context.fillRect(this.x(Math.max(item.kv_start, hover.kv[0])), y, Math.max(2, this.x(Math.min(item.kv_end, hover.kv[1])) - this.x(Math.max(item.kv_start, hover.kv[0]))), Math.max(1, this.row - 2));
      }
    });
  }

  hit(x, y) {
    const { work, chunks, store } = this;
    const i = Math.floor((y - TOP) / this.row), item = work?.items[i];
    if (!item || y < TOP) return null;
    const chunk = chunks[item.seq], size = store.facts.block_size || 1;
    const first = Math.floor(item.kv_start / size), last = Math.ceil(item.kv_end / size);
    const blocks = store.blockTable(chunk.request, this.cursor.step).slice(first, last);
    return {
      hover: { request: chunk.request.index, item: i, kv: [item.kv_start, item.kv_end] }, request: chunk.request,
      lines: [`work item ${i}: ${plain(chunk.request.id)}`, `query rows [${item.q_start}, ${item.q_start + item.num_rows}), ${item.num_rows} of ${work.blockQ} used`,
        `KV [${formatNumber(item.kv_start)}, ${formatNumber(item.kv_end)})${item.num_splits > 1 ? `, split ${item.split + 1} of ${item.num_splits}` : ""}`,
        `${blocks.length} blocks: ${blocks.slice(0, 12).join(" ")}${blocks.length > 12 ? " …" : ""}`],
    };
  }

  clicked(hit) { this.cursor.select(hit.request.index); }

  describe() { return this.work ? this.facts().join("; ") : ""; }

  tableTwin() {
    this.layout();
    return {
      caption: this.work ? this.facts().join(" · ") : "", headings: ["item", "request", "q from", "rows", "of", "KV from", "KV to", "split"],
      rows: (this.work?.items || []).map((item, i) => [i, plain(this.chunks[item.seq].request.id), item.q_start, item.num_rows, this.work.blockQ, item.kv_start, item.kv_end, `${item.split + 1}/${item.num_splits}`]),
    };
  }
}

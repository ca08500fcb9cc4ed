// The work list of a step: from the recorded launch, or planned from the chunks where none was recorded.

import { plain } from "./dom.js";

const PLANNED_ROWS = 32;

/** @returns { items, blockQ, blockKv, launch, source } with source "launch" or "plan" */
export function workOf(store, step) {
  const launch = store.kernel(step);
  const items = store.workItems(step);
  if (items.length) return { items, blockQ: Math.max(1, launch.block_q || 1), blockKv: Math.max(1, launch.block_kv || 1), launch, source: "launch" };
  return { items: plan(store.chunks(step)), blockQ: PLANNED_ROWS, blockKv: store.facts.block_size || 16, launch, source: "plan" };
}

/** Tiles of at most PLANNED_ROWS query rows, each against the KV its last row sees. */
function plan(chunks) {
  const items = [];
  for (const chunk of chunks) {
    for (let q = 0; q < chunk.n; q += PLANNED_ROWS) {
      const rows = Math.min(PLANNED_ROWS, chunk.n - q);
      items.push({ seq: chunk.seq, q_start: chunk.q0 + q, num_rows: rows, kv_start: 0, kv_end: chunk.start + q + rows, split: 0, num_splits: 1 });
    }
  }
  return items;
}

const ITEM_FIELDS = ["seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits"];

/**
 * What every threadgroup of a shadow launch computed and read, in the order of the grid; null where there was none.
 * @returns [{ index, position, itemIndex, item, blocks, bytes }]
 */
export function threadgroupsOf(shadow) {
  const launch = shadow?.launches?.find((candidate) => candidate.kv_blocks.length);
  if (!launch?.kv_bytes.length) return null;
  const items = shadow.work_items.map((values) => Object.fromEntries(ITEM_FIELDS.map((name, i) => [name, values[i]])));
  return launch.kv_blocks.map(([position, blocks], index) => ({
    index, position, itemIndex: position[0], item: items[position[0]], blocks, bytes: launch.kv_bytes[index],
  }));
}

/** Sums over a work list: rows used and idle, KV positions read and the fewest that had to be read. */
export function workTotals(work, chunks, window) {
  const rows = work.items.filter((item) => item.split === 0).reduce((sum, item) => sum + item.num_rows, 0);
  const slots = work.items.filter((item) => item.split === 0).length * work.blockQ;
  const read = work.items.reduce((sum, item) => sum + item.kv_end - item.kv_start, 0);
  const least = chunks.reduce((sum, chunk) => sum + chunk.end - (window > 0 ? Math.max(0, chunk.start - window + 1) : 0), 0);
  return { rows, slots, read, least };
}

const BYTES = { float32: 4, float16: 2, bfloat16: 2 };

/** Bytes of K and V for one KV position of one layer, 0 when the launch does not say. */
export function bytesPerPosition(launch) {
  return launch ? 2 * (launch.num_kv_heads || 0) * (launch.head_dim || 0) * (BYTES[launch.dtype] || 0) : 0;
}

export function formatBytes(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return `${Math.round(bytes)} B`;
}

/** How far the Metal kernel agreed with the engine when it was run beside a step on the CPU. */
function shadowVerdict(shadow) {
  const difference = typeof shadow.max_difference === "number" ? shadow.max_difference.toExponential(1) : shadow.max_difference;
  return `largest difference from the engine's own attention ${difference}, no faults`;
}

/** What that run did, in words, as far as the rows of the panel do not show it; null when there was none. */
export function shadowFacts(shadow, shown) {
  if (!shadow) return null;
  if (shadow.faults.length) return `Metal kernel on layer ${shadow.layer}, run beside the step: ${plain(shadow.faults.join("; "), 400)}`;
  const { launches } = shadow, sum = (of) => launches.reduce((total, launch) => total + of(launch), 0);
  const merges = launches.length > 1 ? `${launches.length} launches, the last merges the splits · ` : "";
  if (shown) return `${merges}${shadowVerdict(shadow)}`;
  const cache = (field) => sum((launch) => (launch.buffers.k_cache?.[field] || 0) + (launch.buffers.v_cache?.[field] || 0));
  return `Metal kernel on layer ${shadow.layer}, run beside the step: ${sum((launch) => launch.threadgroups)} threadgroups, ${formatBytes(cache("bytes_read"))} of KV read, ${merges}${shadowVerdict(shadow)}`;
}

/** Positions in the grid of the threadgroups that read a block in a shadow launch. */
export function readersOf(shadow, block) {
  return (shadow?.launches || []).flatMap((launch) => launch.kv_blocks.filter(([, blocks]) => blocks.includes(block)).map(([position]) => position));
}

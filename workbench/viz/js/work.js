// The work list of a step: from the recorded launch, or planned from the chunks when none was recorded.

import { firstSeen } from "./geometry.js";

const PLANNED_ROWS = 32;
const FIELDS = ["seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits"];

/** The work items of a step, the size of their tiles, and the `source` of both: "launch" or "plan". */
export function workOf(store, step) {
  const launch = store.kernel(step), items = recordedItems(store, step);
  if (items.length) {
    const blockQ = Math.max(1, launch.block_q || 1), blockKv = Math.max(1, launch.block_kv || 1);
    return { items, blockQ, blockKv, launch, source: "launch" };
  }
  const blockKv = store.facts.block_size || 16;
  return { items: plan(store.chunks(step), store.window(step)), blockQ: PLANNED_ROWS, blockKv, launch, source: "plan" };
}

/** A work item as an object, from the values of its fields. */
export function workItem(values) {
  return Object.fromEntries(FIELDS.map((name, i) => [name, values[i]]));
}

/** The values of the fields of a work item. */
export function fieldsOf(item) {
  return FIELDS.map((name) => item[name]);
}

function recordedItems(store, step) {
  const [from, to] = store.span("work", step), result = [];
  const columns = FIELDS.map((name) => store.column(`work.${name}`));
  for (let w = from; w < to; w++) result.push(workItem(columns.map((column) => column[w])));
  return result;
}

/** Tiles of at most PLANNED_ROWS query rows, each against the KV that its rows see. */
function plan(chunks, window) {
  const items = [];
  for (const chunk of chunks) {
    for (let q = 0; q < chunk.n; q += PLANNED_ROWS) {
      const rows = Math.min(PLANNED_ROWS, chunk.n - q), first = chunk.start + q;
      const kv = { kv_start: firstSeen(first, window), kv_end: first + rows };
      items.push({ seq: chunk.seq, q_start: chunk.q0 + q, num_rows: rows, ...kv, split: 0, num_splits: 1 });
    }
  }
  return items;
}

/** Sums over a work list: query rows, the rows its tiles have room for, KV positions read, and the fewest possible. */
export function workTotals(work, chunks, window) {
  const sum = (list, of) => list.reduce((total, entry) => total + of(entry), 0);
  const tiles = work.items.filter((item) => item.split === 0);
  const needed = (chunk) => chunk.end - firstSeen(chunk.start, window);
  return {
    rows: sum(tiles, (item) => item.num_rows),
    slots: tiles.length * work.blockQ,
    read: sum(work.items, (item) => item.kv_end - item.kv_start),
    least: sum(chunks, needed),
  };
}

const BYTES = { float32: 4, float16: 2, bfloat16: 2 };

/** Bytes of K and V for one KV position of one layer, 0 when the launch does not say. */
export function bytesPerPosition(launch) {
  return launch ? 2 * (launch.num_kv_heads || 0) * (launch.head_dim || 0) * (BYTES[launch.dtype] || 0) : 0;
}

const UNITS = { GB: 1e9, MB: 1e6, kB: 1e3 };

export function formatBytes(bytes) {
  for (const unit in UNITS) {
    if (bytes >= UNITS[unit]) return `${Number((bytes / UNITS[unit]).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

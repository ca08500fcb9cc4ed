// Shadow launches: runs of the Metal kernel beside a step on the CPU, with the inputs of one layer.

import { counted, plain } from "./dom.js";
import { formatBytes, workItem } from "./work.js";

/**
 * Work and reads of each threadgroup of a shadow launch, in the order of the grid; null when there was none.
 * @returns A list of { index, position, itemIndex, item, blocks, bytes }.
 */
export function threadgroupsOf(shadow) {
  const launch = shadow?.launches?.find((candidate) => candidate.kv_blocks.length);
  if (!launch?.kv_bytes.length) return null;
  const items = shadow.work_items.map(workItem);
  return launch.kv_blocks.map(([position, blocks], index) => {
    const itemIndex = position[0];
    return { index, position, itemIndex, item: items[itemIndex], blocks, bytes: launch.kv_bytes[index] };
  });
}

/** The text about the largest difference between kernel and engine. */
function verdict({ max_difference: difference }) {
  const written = typeof difference === "number" ? difference.toExponential(1) : difference;
  return `differs from the engine's attention by at most ${written}, no faults`;
}

/** A summary of the launch, shorter when the rows of the panel show it; null when there was none. */
export function shadowFacts(shadow, shown) {
  if (!shadow) return null;
  const { layer, faults, launches } = shadow, where = `Shadow launch of the Metal kernel on layer ${layer}`;
  if (faults.length) return `${where}: ${plain(faults.join("; "), 400)}`;
  const merges = launches.length > 1 ? `${launches.length} launches, of which the last merges the splits · ` : "";
  if (shown) return `${merges}${verdict(shadow)}`;
  let threadgroups = 0, bytes = 0;
  for (const launch of launches) {
    threadgroups += launch.threadgroups;
    for (const cache of ["k_cache", "v_cache"]) bytes += launch.buffers[cache]?.bytes_read || 0;
  }
  return `${where}: ${counted(threadgroups, "threadgroup")}, ${formatBytes(bytes)} of KV read, ${merges}${
    verdict(shadow)
  }`;
}

/** Positions in the grid of the threadgroups that read a block. */
export function readersOf(shadow, block) {
  const reads = (shadow?.launches || []).flatMap((launch) => launch.kv_blocks);
  return reads.filter(([, blocks]) => blocks.includes(block)).map(([position]) => position);
}

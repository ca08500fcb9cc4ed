// The requests that hold a KV block, and the one whose KV a cached block has.

import { lastAtOrBefore } from "./sorted.js";

const MOST_NAMED = 4;

/** The requests that hold a block at a step: its owner first, the others in order of arrival. */
export function holdersOf(store, block, step) {
  const { owner, references } = store.pool.at(step);
  if (!references[block]) return [];
  const first = store.requests[owner[block]], all = store.blocksByGroup(step).places.get(block)?.requests ?? [];
  return [first, ...all.filter((request) => request !== first)];
}

/** Some requests as parts of a sentence, "r1, r2 and 3 more"; `partOf` gives that of a request. */
export function listed(requests, partOf) {
  const parts = requests.slice(0, MOST_NAMED).map(partOf), hidden = requests.length - parts.length;
  if (hidden) parts.push(`${hidden} more`);
  return parts.flatMap((part, i) => [i === 0 ? "" : i === parts.length - 1 ? " and " : ", ", part]).slice(1);
}

/**
 * The place that a free block with content had, up to a step.
 * @returns The `request` that computed its KV, with the `group`, the `logical` block, and the step `from` which it did;
 *   of a block that was computed before the steps that are here, the last request that held it, without `from`. Null if
 *   no request is known.
 */
export function originOf(store, block, step) {
  let computed = null, held = null;
  for (const request of store.requests) {
    for (const table of request.tables) {
      table.groups.forEach(({ ids, lengths }, group) => {
        const length = lastAtOrBefore(lengths, step, ([from]) => from)?.[1] ?? 0;
        const logical = length ? ids.lastIndexOf(block, length - 1) : -1;
        if (logical < 0) return;
        const [since] = lengths.find(([, count]) => count > logical);
        const place = { request, group, logical }, until = Math.min(step, (table.closed ?? Infinity) - 1);
        const from = stepOf(store, request, logical * store.groups[group].block_size, since, until);
        if (from >= (computed?.from ?? 0)) computed = { ...place, from };
        if (since >= (held?.since ?? -1)) held = { ...place, since };
      });
    }
  }
  return computed ?? held;
}

/** The first step from `since` to `until` that computed a position of a request; -1 for none. */
function stepOf(store, request, position, since, until) {
  const start = store.column("chunk.start"), count = store.column("chunk.num_tokens");
  for (let i = 0; i < request.chunks.length && request.chunkSteps[i] <= until; i++) {
    const c = request.chunks[i];
    if (request.chunkSteps[i] >= since && start[c] <= position && position < start[c] + count[c]) {
      return request.chunkSteps[i];
    }
  }
  return -1;
}

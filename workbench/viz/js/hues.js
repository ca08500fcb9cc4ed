// The hue of each request.
// A hue is given when a request first runs, and never taken back: a picture of a past step stays as it was, however far
// the run has gone since. A request that ended keeps its hue, and one that begins later may share it: the two are in no
// step together.

import { isOver } from "./request.js";

/**
 * The hue slot of each request that has one, as a Map from index to slot, in the order in which they began to run.
 * A request takes the lowest slot that nobody had before it; if there is none, that of the request that ended longest
 * ago. While the holders of all slots run, it gets none.
 * @param numSlots Number of hues.
 * @param kept Slots by id, of requests that have theirs already.
 */
export function hueSlots(requests, numSlots, kept = new Map()) {
  const holders = Array(numSlots).fill(null), slots = new Map();
  const give = (request, slot) => {
    holders[slot] = request;
    slots.set(request.index, slot);
  };
  const mine = requests.filter(({ id }) => kept.has(id));
  for (const request of mine.sort((a, b) => lastStepOf(a) - lastStepOf(b))) give(request, kept.get(request.id));
  const begun = requests.filter(({ id, chunks }) => chunks.length && !kept.has(id));
  for (const request of begun.sort((a, b) => a.chunks[0] - b.chunks[0])) {
    const slot = freeSlot(holders, request);
    if (slot !== undefined) give(request, slot);
  }
  return slots;
}

/** The slot for a request that begins to run; undefined while all holders run. */
function freeSlot(holders, request) {
  const [begin] = request.chunkSteps, ends = holders.map((holder) => holder ? lastStepOf(holder) : -Infinity);
  const longestAgo = Math.min(...ends);
  return longestAgo < begin ? ends.indexOf(longestAgo) : undefined;
}

/** The step in which a request ended; infinity before its end. */
function lastStepOf({ changes }) {
  const last = changes.at(-1);
  return last && isOver(last.state) ? last.step : Infinity;
}

/** Whether two requests run at the same time. */
export function runTogether(a, b) {
  const began = ({ chunkSteps }) => chunkSteps[0] ?? Infinity;
  return began(a) <= lastStepOf(b) && began(b) <= lastStepOf(a);
}

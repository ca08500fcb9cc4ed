// One request of a trace as a view knows it.

import { plain } from "./dom.js";

/** Maximum number of characters of a request's label in a picture. */
const LABEL = 10;

/** The step of everything that happened before the first one. */
const BEFORE = -1;

/** The beginning of an id up to its last separator. */
const stem = (id) =>
  id.slice(0, Math.max(...["-", "_", ".", ":", "/"].map((separator) => id.lastIndexOf(separator))) + 1);

/** The beginning that ids share, of those before (undefined for none) and one more, up to a separator. */
export function sharedStem(before, id) {
  if (before === undefined) return stem(id);
  let n = 0;
  while (n < before.length && before[n] === id[n]) n++;
  return stem(id.slice(0, n));
}

/** The name of a request in a picture. A long id goes without the beginning that all share, and without its middle. */
export function labelOf(request, shared) {
  const { id } = request;
  if (request.own) return nameOf(request, LABEL);
  if (id.length <= LABEL) return plain(id, LABEL);
  const rest = withoutRandomEnd(id).slice(shared.length) || id.slice(shared.length);
  return plain(rest.length < LABEL ? `…${rest}` : `${rest.slice(0, LABEL - 5)}…${rest.slice(-4)}`, LABEL);
}

/** An id without the random characters that vLLM appends: "cmpl-chat-72-0-5d6182c6" is the client's 72. */
const withoutRandomEnd = (id) => id.replace(/^((?:chat)?cmpl-.+)-[0-9a-f]{8}$/, "$1");

/** The name of a request for a reader: those that were asked for in this view say so. */
export function nameOf({ id, own }, limit = 40) {
  return plain(own ? `you (${id})` : id, limit);
}

/**
 * @param info The entry of the request in a packet.
 * @param index Its place in the order of arrival.
 * @param start The state of all requests before the first step, in a trace that begins in the middle of a run.
 */
export function newRequest(info, index, start) {
  const request = {
    ...info,
    index,
    label: "", // the name in a picture
    own: false, // asked for in this view
    chunks: [], // indices into the chunk columns
    chunkSteps: [], // the step of each of them
    tokens: [], // those of the steps that are here: { step, text, id, chunk }
    numBefore: 0, // number of output tokens before the first step that is here; null if it is not known (yet)
    tokenBefore: null, // the step of the latest of them, which is negative; null for none, or if it is not known
    computedBefore: 0, // number of KV positions that were computed before that step and are kept
    everBefore: 0, // the same with those that a preemption threw away; null if it is not known
    hasText: Boolean(info.prompt), // false if neither the prompt nor any token has a text
    tables: [], // block tables since an admission: { step, groups: one table for each KV cache group }
    // { step, state } with state "waiting" | "running" | "preempted" | "finished" | "aborted"; a change before the
    // first step is in step -1, as are the block tables of that moment
    changes: [],
    finishReason: "",
    wait: null, // the words of a wait that is over; see way.js
  };
  if (start) placeAtStart(request, start);
  return request;
}

/** Whether a request in this state never runs again. */
export const isOver = (state) => state === "finished" || state === "aborted";

/**
 * A block table: its `ids` only grow; `lengths` are [step, length], `holes` the places [step, place] that became 0.
 * @param ids Those that it has before the first step.
 */
export function newTable(ids = []) {
  return { ids: [...ids], lengths: ids.length ? [[BEFORE, ids.length]] : [], holes: [] };
}

/** The steps in which a request waits: { state, begin, until }, with state "waiting" or "preempted". */
export function waitsOf(store, { changes }) {
  const until = (i) => changes[i + 1]?.step ?? store.numSteps;
  const all = changes.map(({ state, step }, i) => ({ state, begin: Math.max(0, step), until: until(i) }));
  return all.filter(({ state, begin, until }) => (state === "waiting" || state === "preempted") && begin < until);
}

function placeAtStart(request, start) {
  const has = (table) => Object.hasOwn(table, request.id);
  if (has(start.num_outputs)) request.numBefore = start.num_outputs[request.id];
  if (has(start.last_tokens)) request.tokenBefore = start.last_tokens[request.id];
  if (has(start.num_computed)) request.computedBefore = start.num_computed[request.id];
  if (has(start.ever_computed)) request.everBefore = start.ever_computed[request.id];
  const table = has(start.tables) && start.tables[request.id];
  if (table) {
    const others = has(start.other_tables) ? start.other_tables[request.id] : [];
    request.tables.push({ step: BEFORE, groups: [table, ...others].map((ids) => newTable(ids)) });
    request.changes.push({ step: BEFORE, state: "running" });
  } else if (start.waiting.includes(request.id)) {
    request.changes.push({ step: BEFORE, state: request.everBefore ? "preempted" : "waiting" });
  }
}

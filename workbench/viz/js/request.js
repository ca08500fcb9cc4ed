// One request of a trace as a view knows it.

/**
 * @param info The entry of the request in a packet.
 * @param index Its place in the order of arrival.
 * @param start The state of all requests before the first step, in a trace that begins in the middle of a run.
 */
export function newRequest(info, index, start) {
  const request = {
    ...info,
    index,
    chunks: [], // indices into the chunk columns
    chunkSteps: [], // the step of each of them
    tokens: [], // { step, text, id, chunk }
    hasText: Boolean(info.prompt), // false if neither the prompt nor any token has a text
    tables: [], // block tables since an admission: { step, groups: one table for each KV cache group }
    changes: [], // { step, state } with state "waiting" | "running" | "preempted" | "finished" | "aborted"
    finishReason: "",
  };
  if (start) placeAtStart(request, start);
  return request;
}

/** A block table: its `ids` only grow; `lengths` are [step, length], `holes` the places [step, place] that became 0. */
export function newTable(ids = []) {
  return { ids: [...ids], lengths: ids.length ? [[0, ids.length]] : [], holes: [] };
}

function placeAtStart(request, start) {
  const table = Object.hasOwn(start.tables, request.id) && start.tables[request.id];
  if (table) {
    const others = Object.hasOwn(start.other_tables, request.id) ? start.other_tables[request.id] : [];
    request.tables.push({ step: 0, groups: [table, ...others].map((ids) => newTable(ids)) });
    request.changes.push({ step: 0, state: "running" });
  } else if (start.waiting.includes(request.id)) request.changes.push({ step: 0, state: "waiting" });
  else if (start.over.includes(request.id)) request.changes.push({ step: -1, state: "finished" });
}

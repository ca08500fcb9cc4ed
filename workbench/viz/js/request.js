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
    tables: [], // block tables: { step, ids, lengths: [[step, length], ...] }
    changes: [], // { step, state } with state "waiting" | "running" | "preempted" | "finished" | "aborted"
    finishReason: "",
  };
  if (start) placeAtStart(request, start);
  return request;
}

function placeAtStart(request, start) {
  const table = Object.hasOwn(start.tables, request.id) && start.tables[request.id];
  if (table) {
    request.tables.push({ step: 0, ids: [...table], lengths: [[0, table.length]] });
    request.changes.push({ step: 0, state: "running" });
  } else if (start.waiting.includes(request.id)) request.changes.push({ step: 0, state: "waiting" });
  else if (start.over.includes(request.id)) request.changes.push({ step: -1, state: "finished" });
}

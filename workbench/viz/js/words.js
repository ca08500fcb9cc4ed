// Words for chunks, shared by the panels.

import { counted, formatNumber, formatSeconds, plain } from "./dom.js";

const ROLES = {
  decode: "decode",
  new_final: "whole prompt",
  intermediate: "part of a prompt",
  cached_final: "last chunk",
};

/** The reasons for which requests finish. */
const ENDS = { length: "hit max_tokens", stop: "model ended", error: "failed", abort: "aborted" };

/** The first few of some names, and how many more there are. */
export function listOf(items, most = 3) {
  return items.length > most ? `${items.slice(0, most).join(", ")} and ${items.length - most} more` : items.join(", ");
}

/** The reason for which a request finished; at max_model_len if `isCut`, for its length before it had max_tokens. */
export function endOf(reason, isCut) {
  return reason === "length" && isCut ? "hit max_model_len" : ENDS[reason] ?? reason;
}

/** The role of a chunk. */
export function roleOf(chunk) {
  return ROLES[chunk.arm];
}

/** The reason why a chunk is not longer. */
export function limitOf(chunk) {
  if (chunk.limitedBy === "complete") return "not limited";
  return `limited by ${chunk.limitedBy.replaceAll("_", " ")}`;
}

/** The fate of a chunk's drafts. */
export function draftsOf(chunk) {
  return `${chunk.accepted} of ${chunk.drafts} ${chunk.drafts === 1 ? "draft" : "drafts"} accepted`;
}

/** The kind of a KV cache group. */
export function groupOf({ kind, window }) {
  if (kind === "sliding_window") return `window ${formatNumber(window)}`;
  return kind === "mamba" ? "state" : "full attention";
}

/** The KV cache group whose attention and slots a step is drawn with, if there are several. */
export function shownGroup({ groups, facts: { layout_group: index } }) {
  return groups.length > 1
    ? `Of ${groups.length} KV cache groups this is group ${index}: ${groupOf(groups[index])}.`
    : "";
}

/** Number of tokens with computed KV before and after a chunk. */
export function kvOf(chunk) {
  return `KV ${formatNumber(chunk.start)} → ${formatNumber(chunk.end)}`;
}

/** The numbers of a step, in the order of its work. */
export function numbersOf(store, step) {
  const value = (name) => formatNumber(store.value(name, step));
  const tokens = `${value("prefill_tokens")} prefill + ${value("decode_tokens")} decode`;
  const lines = [`${tokens} = ${formatNumber(store.numTokens(step))} of ${value("token_budget")} tokens`];
  if (store.value("recomputed_tokens", step)) {
    lines.push(`${counted(store.value("recomputed_tokens", step), "token")} recomputed after a preemption`);
  }
  if (store.timed()) {
    const phases = store.phases(step).map(({ name, seconds }) => `${plain(name, 20)} ${formatSeconds(seconds)}`);
    lines.push(`${formatSeconds(store.duration(step))}${phases.length ? `: ${phases.join(", ")}` : ""}`);
  }
  lines.push(`${value("num_running")} running, ${value("num_waiting")} waiting, ${value("free_blocks")} free blocks`);
  return lines;
}

/** The steps of a run that a view holds: "the whole run", or those of a part by number. */
export function heldOf(store) {
  const [first, last] = [0, store.numSteps - 1].map((step) => formatNumber(store.label(step)));
  return store.isPart ? `steps ${first} to ${last}` : "the whole run";
}

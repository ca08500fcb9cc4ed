// The way of a request through the engine in a few facts: its wait and the requests in front, the pieces of its
// prompt, its first token, its reply. A fact is [name, parts]; the inspector makes links of the parts.

import { counted, formatNumber, formatSeconds, median, plain } from "./dom.js";
import { limitOf } from "./words.js";

/** Shorter waits are not worth a sentence. */
const NO_WAIT_SECONDS = 0.002;

/** Maximum number of pieces of a prompt, and of causes of a wait, that are named one by one. */
const MOST = 3;

/** The facts of a request up to the newest step. */
export function wayOf(view, request) {
  const { store } = view, isOver = request.chunks.length > 0;
  // A wait that is over stays as it is, and may be of thousands of steps.
  const facts = [], wasComputed = request.numBefore > 0 || request.everBefore > 0; // before the steps that are here
  const hasBegun = wasComputed || (isOver && request.numBefore === null); // so its wait is of earlier steps
  if (!hasBegun) {
    const wait = request.wait ?? waitOf(view, request);
    facts.push([isOver ? "waited" : "waits", wait]);
    if (isOver) request.wait = wait;
    if (isOver) facts.push(["prompt", promptOf(view, request)]);
  }
  for (const { step, kind, reason } of preemptions(store, request)) {
    facts.push([kind === "preempt" ? "preempted" : kind, [
      "in ",
      toStep(view, step),
      reason && `: ${plain(reason, 160)}`,
    ]]);
  }
  if (request.tokens.length) {
    if (!hasBegun) facts.push(["first token", firstTokenOf(view, request)]);
    facts.push(["reply", [replyOf(store, request)]]);
  }
  return facts;
}

const toStep = (view, step) => view.inspector.toStep(step);
const toRequest = (view, request) => view.inspector.toRequest(request);

function preemptions(store, request) {
  const steps = request.changes.filter(({ state }) => state === "preempted").slice(0, MOST);
  return steps.flatMap(({ step }) =>
    store.events(step).filter((event) => event.kind === "preempt" && event.request === request)
  );
}

/** The request with most tokens in a step, besides one; null for none. */
function biggest(store, step, besides) {
  const others = store.chunks(step).filter((chunk) => chunk.request !== besides);
  return others.reduce((most, chunk) => (!most || chunk.n > most.n ? chunk : most), null);
}

/** Seconds from the arrival to the first step with a chunk, or until now; null without a clock. */
function secondsWaited(store, request, first) {
  if (!store.timed() || !request.arrival_time) return null;
  const until = first < store.numSteps ? store.value("time", first) : store.value("end", store.numSteps - 1);
  return Math.max(0, until - request.arrival_time);
}

function waitOf(view, request) {
  const { store } = view, first = request.chunkSteps[0] ?? store.numSteps;
  const from = Math.max(0, request.arrival_step - store.label(0)), seconds = secondsWaited(store, request, first);
  const causes = [...beforeFirstLook(view, request, from), ...leftOut(view, request, from, first)];
  if (!causes.length && !request.chunks.length) return ["for the next step"];
  if (!causes.length && (seconds ?? 0) < NO_WAIT_SECONDS) return ["no time: the next step took it"];
  const shown = causes.slice(0, MOST).flatMap((parts, i) => [i ? "; " : ": ", ...parts]);
  if (causes.length > MOST) shown.push(`; and ${causes.length - MOST} more causes`);
  return [seconds === null ? counted(first - from, "step") : formatSeconds(seconds), ...shown];
}

/** The time between an arrival and the next step: the rest of a step in progress, or an engine that stood still. */
function beforeFirstLook(view, request, from) {
  const { store } = view, before = from - 1;
  if (!store.timed() || !request.arrival_time || from > store.numSteps) return [];
  const until = from < store.numSteps ? store.value("time", from) : Infinity;
  const busy = before >= 0 ? store.value("end", before) - request.arrival_time : 0;
  if (busy > NO_WAIT_SECONDS) {
    const chunk = biggest(store, before, request), words = ["the rest of ", toStep(view, before)];
    return [chunk ? [...words, ", with ", counted(chunk.n, "token"), " of ", toRequest(view, chunk.request)] : words];
  }
  return until - request.arrival_time > NO_WAIT_SECONDS && until < Infinity ? [["the engine stood still"]] : [];
}

/** The steps that left a waiting request out, joined as long as the reason stays the same. */
function leftOut(view, request, from, first) {
  const { store } = view, groups = [];
  for (let step = from; step < first; step++) {
    const reason = store.reasonOf(request, step), key = reason && `${reason.kind} ${reason.limit} ${reason.behind}`;
    if (groups.at(-1)?.key === key) groups.at(-1).to = step;
    else groups.push({ key, reason, step, to: step });
  }
  return groups.map(({ reason, step, to }) => {
    const when = step === to ? [" in ", toStep(view, step)] : [" in ", toStep(view, step), " to ", toStep(view, to)];
    const words = plain(reason?.sentence || "not scheduled", 200), chunk = biggest(store, step, request);
    const most = reason?.root === "token_budget" && chunk
      ? [", ", formatNumber(chunk.n), " of it by ", toRequest(view, chunk.request)]
      : [];
    return [words, ...most, ...when];
  });
}

/** The chunks before the first token. */
function promptOf(view, request) {
  const { store } = view, until = request.tokens[0]?.step ?? Infinity;
  const steps = request.chunkSteps.filter((step) => step <= until);
  const pieces = steps.map((_, i) => store.chunk(request.chunks[i])), { length } = pieces, last = pieces.at(-1);
  const cached = pieces[0].cached
    ? `, ${formatNumber(pieces[0].cached)} of them found in the prefix cache; the rest`
    : "";
  const parts = [`${counted(request.num_prompt_tokens, "token")}${cached}`];
  if (length === 1) parts.push(" in one piece, in ", toStep(view, steps[0]));
  else if (length <= MOST) {
    parts.push(` in ${length} pieces: `);
    pieces.forEach((piece, i) => parts.push(i ? ", " : "", `${formatNumber(piece.n)} in `, toStep(view, steps[i])));
  } else parts.push(` in ${length} pieces, `, toStep(view, steps[0]), " to ", toStep(view, steps.at(-1)));
  if (length > 1) parts.push(` (the first ${limitOf(pieces[0])})`);
  const rest = request.num_prompt_tokens - last.end;
  if (rest > 0) parts.push(`; ${formatNumber(rest)} still to come`);
  return parts;
}

function firstTokenOf(view, request) {
  const { store } = view, { step, chunk } = request.tokens[0], latency = store.column("chunk.latency")[chunk];
  const steps = counted(store.latencySteps(request, 0), "step");
  const when = store.timed() && !Number.isNaN(latency) ? formatSeconds(latency) : steps;
  return [`after ${when}, in `, toStep(view, step)];
}

function replyOf(store, request) {
  const { tokens, finishReason } = request, latency = store.column("chunk.latency"), gaps = [];
  for (const { chunk } of tokens.slice(request.numBefore ? 0 : 1)) if (latency[chunk] > 0) gaps.push(latency[chunk]);
  gaps.sort((a, b) => a - b);
  const pace = store.timed() && gaps.length ? `, one every ${formatSeconds(median(gaps))} (median)` : "";
  return `${counted(request.numBefore + tokens.length, "token")}${finishReason ? "" : " so far"}${pace}` +
    (finishReason ? `; ${store.finishWords(request)}` : "");
}

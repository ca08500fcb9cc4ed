// One step as five scenes, in the order of its work: schedule, blocks, mask, attention, sample. A scene is facts of the
// record (tokens, block ids, KV positions) and a sentence made from them; film.js draws it.

import { counted, formatNumber, plain } from "./dom.js";
import { listOf, shownGroup } from "./words.js";
import { workOf } from "./work.js";

/** Names and titles of the scenes. */
export const SCENES = [
  ["schedule", "Who gets tokens"],
  ["blocks", "Where the keys and values go"],
  ["mask", "Which positions a token may see"],
  ["attention", "What the kernel computes"],
  ["sample", "Who gets a new token"],
];

/** The scenes of a step: { name, title, sentence, and the facts of its picture }. */
export function scenesOf(store, step) {
  const chunks = store.chunks(step);
  const made = { schedule, blocks, mask, attention, sample };
  return SCENES.map(([name, title]) => ({ name, title, step, ...made[name](store, step, chunks) }));
}

/** The token budget, filled chunk by chunk, and the requests that are left out, each with the reason. */
function schedule(store, step, chunks) {
  const budget = store.value("token_budget", step),
    bars = chunks.map(({ request, q0, q1, decode }) => {
      return { request: request.index, from: q0, to: q1, decode };
    });
  const left = store.requests.filter((request) => ["waiting", "preempted"].includes(store.stateOf(request, step)));
  const waits = left.map((request) => ({ request: request.index, why: store.whyNot(request, step) }));
  return { budget, bars, waits, sentence: store.sentence(step) };
}

/** The block table of each scheduled request: which places are new, and which were found in the prefix cache. */
function blocks(store, step, chunks) {
  const group = store.facts.layout_group, { block_size: size } = store.groups[group];
  const rows = chunks.map((chunk) => {
    const places = placesOf(store, chunk, step, group);
    return { request: chunk.request.index, places, from: chunk.start, to: chunk.end };
  });
  const all = chunks.flatMap((chunk) => store.groups.flatMap((_, each) => placesOf(store, chunk, step, each)));
  const count = (is) => all.filter(is).length;
  const taken = count(({ fresh, found }) => fresh && !found), found = count((place) => place.found);
  const free = store.value("free_blocks", step),
    from = found ? `${counted(found, "block")} found in the prefix cache, ` : "";
  const numBlocks = Math.max(0, store.pool.size - 1); // block 0 is never handed out, as in vLLM
  const sentence = `${from}${counted(taken, "block")} taken for new tokens; ${formatNumber(free)} of ` +
    `${formatNumber(numBlocks)} are free.${lossesOf(store, step)}`;
  return { size, rows, sentence: sentence[0].toUpperCase() + sentence.slice(1) };
}

/** The places of a chunk's block table in a group: the block, and whether this step took it, or found it cached. */
function placesOf(store, chunk, step, group) {
  const { block_size: size } = store.groups[group], before = store.blockTable(chunk.request, step - 1, group);
  return store.blockTable(chunk.request, step, group).map((block, logical) => {
    const fresh = Boolean(block) && before[logical] !== block;
    return { block, fresh, found: fresh && (logical + 1) * size <= chunk.cached };
  });
}

/** The requests that a step preempted, each with the number of blocks that it lost. */
function lossesOf(store, step) {
  const preempted = store.events(step).filter(({ kind }) => kind === "preempt");
  const losses = preempted.map(({ request }) => {
    const tables = store.groups.map((_, group) => store.blockTable(request, step - 1, group));
    const held = tables.flat().filter(Boolean).length;
    return `${plain(request.id, 20)} its ${counted(held, "block")}`;
  });
  return losses.length ? ` Preempted: ${listOf(losses)}.` : "";
}

/** Each query row with the KV positions [from, to) that it may attend to: its own request's, up to itself. */
function mask(store, step, chunks) {
  const window = store.window(step);
  const bands = chunks.map((chunk) => ({
    request: chunk.request.index,
    q0: chunk.q0,
    q1: chunk.q1,
    start: chunk.start,
    end: chunk.end,
  }));
  const rows = chunks.at(-1)?.q1 ?? 0, columns = chunks.reduce((sum, chunk) => sum + chunk.end, 0);
  const limit = window ? ` and at most the last ${formatNumber(window)}` : "";
  const sentence =
    `${counted(rows, "query row")} of ${counted(chunks.length, "request")} stand in one batch, against ` +
    `${counted(columns, "KV position")}: a row sees its own request, up to itself${limit}. ${shownGroup(store)}`.trim();
  return { window, rows, columns, bands, sentence };
}

/** The work items: a tile of query rows, and the KV positions that it reads through the block table. */
function attention(store, step, chunks) {
  const work = workOf(store, step),
    items = work.items.map((item) => ({
      request: chunks[item.seq].request.index,
      rows: item.num_rows,
      from: item.kv_start,
      to: item.kv_end,
    }));
  const read = items.reduce((sum, { from, to }) => sum + to - from, 0);
  const longest = items.reduce((most, { to }) => Math.max(most, to), 0);
  const planned = work.source === "plan" ? " (planned; no launch was recorded)" : "";
  const sentence =
    `${counted(items.length, "work item")}${planned} read ${counted(read, "KV position")} through the block ` +
    `tables; the longest ends at position ${formatNumber(longest)}.`;
  return { items, longest, sentence };
}

/** The tokens that the step gives, and why the other requests get none. */
function sample(store, _step, chunks) {
  const rows = chunks.map(({ request, index }) => {
    const tokens = request.tokens.map((token, number) => ({ ...token, number })).filter((t) => t.chunk === index);
    return { request: request.index, tokens: tokens.map(({ number }) => store.tokenText(request, number)) };
  });
  const without = rows.filter(({ tokens }) => !tokens.length).map(({ request }) =>
    plain(store.requests[request].id, 20)
  );
  const num = rows.reduce((sum, { tokens }) => sum + tokens.length, 0);
  const drafts = chunks.reduce((sum, chunk) => sum + chunk.drafts, 0);
  const accepted = chunks.reduce((sum, chunk) => sum + chunk.accepted, 0);
  const checked = drafts
    ? ` Of ${counted(drafts, "draft")}, ${formatNumber(accepted)} ${accepted === 1 ? "is" : "are"} accepted.`
    : "";
  const more = without.length ? ` ${listOf(without)}: none, because the tokens before are not all computed yet.` : "";
  return { rows, sentence: `${counted(num, "token")} ${num === 1 ? "is" : "are"} sampled.${checked}${more}` };
}

// Search: a position of a request, a step, a kind of event, or the name of a request, which filters the panels.

import { holdersOf, listed } from "./block_holders.js";
import { HIDDEN } from "./classroom.js";
import { counted, formatNumber, h, plain, replace } from "./dom.js";
import { isOver, nameOf } from "./request.js";

/** Events by the words that people use for them. */
const EVENT_WORDS = {
  preempt: /^(preempt(ed|ion|ions)?)$/i,
  finish: /^(finish(ed)?|done|ended)$/i,
  admit: /^(admit(ted)?|admission)$/i,
  resume: /^(resume(d)?)$/i,
  abort: /^(abort(ed)?)$/i,
};

/** Maximum number of answers in the list. */
const MOST = 12;

/**
 * The answers to a query: a list of { words, go }, where `go` shows the answer in the panels; null when the query is
 * the name of a request, or the beginning of one.
 */
export function answers(view, query) {
  const { store, cursor } = view, asked = query.trim();
  const step = /^step\s+([\d,]+)$/i.exec(asked);
  if (step) return [stepAnswer(store, cursor, Number(step[1].replaceAll(",", "")))];
  const block = /^block\s+(\d+)$/i.exec(asked);
  if (block) return [blockAnswer(view, Number(block[1]))];
  const [kind] = Object.entries(EVENT_WORDS).find(([, words]) => words.test(asked)) || [];
  if (kind && !store.byId.has(asked)) return eventAnswers(view, kind);
  const position = /^(.+?)\s+(?:token\s+|position\s+)?(\d[\d,]*)$/i.exec(asked);
  const called = position ? named(store, position[1].trim(), asked) : [];
  if (!called.length) return null;
  if (called.length === 1) return [positionAnswer(view, called[0], Number(position[2].replaceAll(",", "")))];
  const name = plain(position[1].trim(), 40);
  return [{ words: `${counted(called.length, "request")} have “${name}” in their names: give more of the name.` }];
}

/** The requests with a text in their names, in any case of letters, as the filter of the panels has it. */
function withInName(store, text) {
  return store.requests.filter(({ id }) => id.toLowerCase().includes(text.toLowerCase()));
}

/** The request with exactly this name, or else those with it in theirs, unless a name has all that was `asked`. */
function named(store, name, asked) {
  const exact = store.byId.get(name), found = exact ? [exact] : withInName(store, name);
  const same = found.filter(({ id }) => id.length === name.length);
  return same.length ? same : withInName(store, asked).length ? [] : found;
}

/** The answers to the name of a request, or to a part of one; a number may mean a step as well. */
function nameAnswers({ store, cursor, inspector }, asked, count) {
  const step = /^[\d,]+$/.test(asked) ? stepAnswer(store, cursor, Number(asked.replaceAll(",", ""))) : null;
  const [only] = count === 1 ? withInName(store, asked) : [];
  if (only) {
    const go = () => inspector.pin({ kind: "request", request: only.index });
    return [...(step?.go ? [step] : []), { words: `The panels show only ${nameOf(only)}. Open its card`, go }];
  }
  if (count) {
    const words = `${counted(count, "request")} of ${formatNumber(store.requests.length)}: the panels show no other.`;
    return [...(step?.go ? [step] : []), { words }];
  }
  const examples = "Search also finds “step 12”, “block 3”, “preempted” or “long 700”.";
  return [step || { words: `No request has “${plain(asked, 40)}” in its name. ${examples}` }];
}

function stepAnswer(store, cursor, label) {
  const step = label - store.label(0);
  if (step < 0 || step >= store.numSteps) {
    const known = store.numSteps
      ? `from ${formatNumber(store.label(0))} to ${formatNumber(store.label(cursor.last))}`
      : "";
    return { words: `There is no step ${formatNumber(label)}${known && `; the steps are ${known}`}.` };
  }
  return { words: store.sentence(step) || `Step ${label}`, go: () => cursor.seek(step), at: step };
}

function blockAnswer(view, block) {
  const { store, cursor } = view, pool = store.pool.at(cursor.step);
  if (!pool || block >= pool.state.length) return { words: `There is no block ${formatNumber(block)}.` };
  return { words: `Block ${block}: see its history`, go: () => view.inspector.pin({ kind: "block", block }) };
}

function eventAnswers(view, kind) {
  const { store, cursor } = view, found = [];
  for (let step = 0; step < store.numSteps && found.length < MOST; step++) {
    for (const event of store.events(step)) {
      if (event.kind !== kind || found.length === MOST) continue;
      const why = event.words ? `: ${plain(event.words, 80)}` : "";
      found.push({ words: `step ${store.label(step)}: ${nameOf(event.request)}${why}`, go: () => cursor.seek(step) });
    }
  }
  return found.length ? found : [{ words: "This has not happened in any step." }];
}

/** The block, the slot and the step of a position of a request's KV. */
function positionAnswer(view, request, position) {
  const { store, cursor } = view, size = store.facts.block_size, logical = Math.floor(position / size);
  const token = `Token ${formatNumber(position)} of ${nameOf(request)}`;
  const blockAt = (step) => store.blockTable(request, step)[logical];
  let found = store.stepThatComputed(request, position, cursor.step);
  // A block that was there before the steps that are here is in the table of the first one.
  const isOlder = position < request.computedBefore && blockAt(0) && !(found?.step <= cursor.step);
  if (isOlder) found = { step: 0, cached: false };
  if (!size || !found || !blockAt(found.step)) {
    return { words: `${token} is in no KV block: ${whyInNone(store, request, position, found)}.` };
  }
  const now = blockAt(cursor.step) && position < store.numComputed(request, cursor.step);
  const step = now ? cursor.step : found.step, block = blockAt(step);
  const how = found.cached ? "found in the prefix cache in" : isOlder ? "written before" : "written in";
  const slot = position % size, written = store.label(found.step);
  const gone = !now && found.step <= cursor.step ? ` ${whoHolds(store, request, block, cursor.step)}` : "";
  const words = `${token}: block ${block}, slot ${slot} of ${size}, ${how} step ${written}.${gone}`;
  const go = () => {
    cursor.seek(step);
    view.inspector.pin({ kind: "block", block, request: request.index, position });
  };
  return { words, go, block, slot, written };
}

/** A sentence about a block that a request has given back, and its holders at a step. */
function whoHolds(store, request, block, step) {
  const holders = holdersOf(store, block, step), names = listed(holders, (each) => nameOf(each)).join("");
  if (!names || holders[0] === request) return "The block has been given back since.";
  return `${nameOf(request)} has given it back since; ${names} ${holders.length > 1 ? "hold" : "holds"} it.`;
}

/** Why a position is in no block; of a part of a run, the steps that are not here count too. */
function whyInNone(store, request, position, found) {
  const label = (step) => formatNumber(store.label(step)), first = label(0), last = label(store.numSteps - 1);
  if (found) return `step ${label(found.step)} found it in the prefix cache, outside the window, which needs no block`;
  const before = store.everComputedBefore(request);
  if (before === null) return `no step from ${first} to ${last} has computed it`;
  if (position < before) return `it was computed before step ${first}, and its block has been given back`;
  if (isOver(store.stateOf(request, store.numSteps - 1)) || !store.facts.part) return "it has never been computed";
  return `it has not been computed up to step ${last}, where this part ends`;
}

export class SearchBox {
  constructor(view) {
    this.view = view;
    const props = {
      type: "search",
      placeholder: "search (/)",
      "aria-label": "Filter requests by id, or search: a request and a token, a step, an event",
      title: "“long 700”, “step 12”, “preempted”, “block 3”, or the beginning of a request's name",
      oninput: () => this.typed(),
      onkeydown: (event) => this.pressed(event),
    };
    this.input = h("input", props);
    this.list = h("ul", { class: "wb-answers", hidden: true });
    this.element = h("div", { class: "wb-search" }, this.input, h("div", { role: "status" }, this.list));
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  typed() {
    const { view } = this, query = this.input.value.trim();
    const known = query ? (view.classroom.hides ? [{ words: HIDDEN }] : answers(view, query)) : [];
    const named = known ? 0 : withInName(view.store, query).length;
    this.found = known || nameAnswers(view, query, named);
    this.filters = named > 0;
    view.setFilter(named ? query : "");
    this.list.hidden = !this.found.length;
    replace(this.list, this.found.map((answer) => h("li", {}, this.answer(answer))));
  }

  answer({ words, go }) {
    if (!go) return h("span", {}, words);
    return h("button", { type: "button", class: "wb-answer", onclick: () => this.take(go) }, words);
  }

  take(go) {
    go();
    this.list.hidden = true;
    this.view.root.focus({ preventScroll: true });
  }

  pressed(event) {
    if (event.key !== "Enter") return;
    event.preventDefault();
    const first = this.found?.find((answer) => answer.go);
    if (first) this.take(first.go);
    else if (this.filters) this.close(); // words that say why nothing is found stay
  }

  /** Close the list; returns whether it was open. */
  close() {
    const open = !this.list.hidden;
    this.list.hidden = true;
    return open;
  }
}

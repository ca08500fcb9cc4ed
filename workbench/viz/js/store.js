// A trace as a view knows it: the columns of every step received so far, and lookups in them.
// The columns are written by workbench/viz/layout/columns.py; their units are steps, tokens, KV positions and
// block ids, never pixels.

import { Column, decodePacket } from "./packet.js";
import { formatNumber } from "./dom.js";
import { PoolHistory } from "./pool_history.js";
import { labelOf, nameOf, newRequest, newTable, sharedStem } from "./request.js";
import { lastAtOrBefore, upperBound } from "./sorted.js";
import { endOf } from "./words.js";

/** The step column that says how many entries of each kind a step has. */
const COUNTS = {
  chunk: "num_chunks",
  phase: "num_phases",
  event: "num_events",
  passed_over: "num_passed_over",
  pool: "num_pool_changes",
  work: "num_work_items",
};

/** @type {any} A longer time between two steps is idle time (workbench/trace/readings/run_clock.py). */
export const IDLE_SECONDS = "__IDLE_SECONDS__";

/** Roles of a chunk (its field "arm"), by the two lowest bits of its flags. */
const ARMS = ["decode", "new_final", "intermediate", "cached_final"];

/** The state of a request after an event. */
const STATE_AFTER = {
  arrive: "waiting",
  admit: "running",
  resume: "running",
  preempt: "preempted",
  finish: "finished",
  abort: "aborted",
};

export class Store {
  constructor() {
    this.reset();
  }

  /** @param {number} [zero] That of the steps that are forgotten, for those that follow them. */
  reset(zero) {
    this.numSteps = 0;
    this.keptZero = zero;
    this.hasDrafts = false; // whether any chunk has drafts
    this.hasAborts = false; // whether any request was aborted
    this.facts = { config: {}, model: {}, codes: null, source: "" };
    this.requests = []; // one object per request, in order of arrival
    this.byId = new Map();
    this.shared = undefined; // the beginning of all ids
    this.strings = [];
    this.reasons = [];
    this.kernels = [];
    this.supplements = { shadow: new Map(), top_tokens: new Map() }; // name -> step -> facts
    this.columns = new Map(); // "token_budget" or "chunk.start" -> Column
    this.bounds = { chunk: [0], phase: [0], event: [0], passed_over: [0], pool: [0], work: [0] };
    this.pool = new PoolHistory();
    // Seconds since the first step, without the time in which the engine had nothing to do or was paused.
    this.clockStart = new Column("d");
    this.clockEnd = new Column("d");
    this.afterPause = []; // the steps that follow a pause, which the clock leaves out
    this.sentences = []; // one per step
  }

  // -- packets ---------------------------------------------------------------------------------------------------

  /**
   * Add the steps of a packet; steps that are here already may come again.
   * @returns false when steps before the packet are missing: the caller then asks for them.
   */
  append(packet) {
    const { header, arrays } = decodePacket(packet);
    if (header.facts) {
      // A run that forgets its oldest steps continues in another trace, which begins later.
      // A host that shows one run after another numbers them.
      const { first_step, run } = header.facts;
      const isOther = run !== this.facts.run, zero = isOther ? undefined : this.zero;
      if (this.numSteps && (first_step !== this.facts.first_step || isOther)) this.reset(zero);
      this.facts = header.facts;
      this.comparison = header.comparison;
      if (!this.pool.size) this.pool.resize(header.facts.num_blocks);
    }
    if (this.misses(header)) return false;
    this.addRequests(header);
    this.strings.push(...header.strings.slice(this.strings.length - header.first_string));
    this.reasons.push(...header.reasons.slice(this.reasons.length - header.first_reason));
    this.kernels.push(...header.kernels.slice(this.kernels.length - header.first_kernel));
    for (const [step, name, facts] of header.supplements) this.supplements[name]?.set(step, facts);
    this.sentences.push(...header.sentences.slice(Math.max(0, this.numSteps - header.first_step)));
    const fresh = this.skipKnown(header, arrays);
    for (const [name, code] of header.columns) {
      if (!this.columns.has(name)) this.columns.set(name, new Column(code));
      this.columns.get(name).append(fresh[name]);
    }
    this.index(header, fresh);
    return true;
  }

  /** Whether a packet begins after the end of what is here. */
  misses(header) {
    return header.first_step > this.numSteps || header.first_request > this.requests.length ||
      header.first_string > this.strings.length || header.first_reason > this.reasons.length ||
      header.first_kernel > this.kernels.length;
  }

  /** The arrays of a packet without the steps that are here already; the header's step count and texts follow. */
  skipKnown(header, arrays) {
    const known = Math.min(this.numSteps - header.first_step, header.num_steps);
    if (known <= 0) return arrays;
    const sum = (column, count) => column.subarray(0, count).reduce((a, b) => a + b, 0);
    const skip = {};
    for (const kind in COUNTS) skip[kind] = sum(arrays[COUNTS[kind]], known);
    skip.new_block = sum(arrays["chunk.num_new_blocks"], skip.chunk);
    skip.table_change = sum(arrays["chunk.num_table_changes"], skip.chunk);
    skip.sampled_before = sum(arrays["chunk.num_sampled_before"], skip.chunk);
    const sampled = arrays["chunk.sampled"].subarray(0, skip.chunk).reduce((n, id) => n + (id >= 0), 0);
    header.texts = header.texts.slice(sampled);
    header.num_steps -= known;
    const rest = {};
    for (const [name, column] of Object.entries(arrays)) {
      const dot = name.indexOf(".");
      rest[name] = column.subarray(dot < 0 ? known : skip[name.slice(0, dot)]);
    }
    return rest;
  }

  addRequests(header) {
    for (const info of header.requests.slice(this.requests.length - header.first_request)) {
      const request = newRequest(info, this.requests.length, this.facts.start);
      this.requests.push(request);
      this.byId.set(request.id, request);
      this.nameInPictures(request);
    }
  }

  /** Label a request, and all others again if their ids share less now. */
  nameInPictures(request) {
    const shared = sharedStem(this.shared, request.id), several = this.requests.length > 1;
    const again = shared !== this.shared || this.requests.length === 2;
    this.shared = shared;
    for (const each of again ? this.requests : [request]) each.label = labelOf(each, several ? shared : "");
  }

  /** Derive, once per step, everything that panels would otherwise search for. */
  index(header, arrays) {
    const { codes } = this.facts, blocks = this.columns.get("new_block.id");
    const before = this.columns.get("sampled_before.id"), changes = this.columns.get("table_change.value");
    const next = {
      text: 0,
      block: blocks ? blocks.length - arrays["new_block.id"].length : 0,
      change: changes ? changes.length - arrays["table_change.value"].length : 0,
      before: before ? before.length - arrays["sampled_before.id"].length : 0,
    };
    for (let k = 0; k < header.num_steps; k++) {
      const step = this.numSteps;
      for (const kind in COUNTS) this.bounds[kind].push(this.bounds[kind][step] + arrays[COUNTS[kind]][k]);
      this.indexClock(step);
      this.indexEvents(step, codes);
      const [from, to] = this.span("chunk", step);
      for (let c = from; c < to; c++) this.indexChunk(step, c, header.texts, next);
      this.pool.append(step, (name) => this.column(name), ...this.span("pool", step));
      this.numSteps++;
    }
  }

  /** Enter the times of a step. A pause before it counts as long as the step before that, so that it stays visible. */
  indexClock(step) {
    const before = step - 1, gap = step ? this.value("time", step) - this.value("end", before) : 0;
    const idle = gap > IDLE_SECONDS ? this.clockEnd.data[before] - this.clockStart.data[before] : Math.max(0, gap);
    if (gap > IDLE_SECONDS) this.afterPause.push(step);
    const begin = step ? this.clockEnd.data[before] + idle : 0;
    this.clockStart.append([begin]);
    this.clockEnd.append([begin + this.duration(step)]);
  }

  /** Enter a chunk with its request; `next` counts the entries of other columns that have been taken. */
  indexChunk(step, c, texts, next) {
    const request = this.requests[this.column("chunk.request")[c]];
    request.chunks.push(c);
    request.chunkSteps.push(step);
    if (request.numBefore === null) this.countBefore(request, this.chunk(c));
    this.indexTables(request, step, c, next);
    // The text of a chunk belongs to all of its tokens; the first of them carries it.
    let text = "";
    const id = this.column("chunk.sampled")[c], numBefore = this.column("chunk.num_sampled_before")[c];
    if (id >= 0) text = texts[next.text++];
    if (text) request.hasText = true;
    for (let b = 0; b < numBefore; b++, text = "") {
      const before = this.column("sampled_before.id")[next.before++];
      request.tokens.push({ step, chunk: c, id: before, text, drafted: true });
    }
    if (this.column("chunk.num_drafts")[c]) this.hasDrafts = true;
    if (id >= 0) request.tokens.push({ step, chunk: c, id, text });
  }

  /**
   * Count the output tokens before the steps that are here, if a chunk tells it: the first token that it sampled is at
   * the position after its last row (workbench/trace/readings/outputs_before.py).
   */
  countBefore(request, chunk) {
    const first = chunk.end - chunk.drafts;
    if (chunk.sampled >= 0) request.numBefore = first - request.num_prompt_tokens;
    else if (chunk.partial && !chunk.recomputed && first <= request.num_prompt_tokens) request.numBefore = 0;
  }

  /** Enter the changes that a chunk made to the block tables of its request, one per KV cache group. */
  indexTables(request, step, c, next) {
    const newBlocks = this.column("chunk.num_new_blocks")[c], changes = this.column("chunk.num_table_changes")[c];
    if (!newBlocks && !changes) return;
    const fresh = !request.tables.length || request.tables.at(-1).closed || request.startsTable === step;
    if (fresh) request.tables.push({ step, groups: this.groups.map(() => newTable()) });
    const { groups } = request.tables.at(-1), ids = this.column("new_block.id");
    for (let b = 0; b < newBlocks; b++) groups[0].ids.push(ids[next.block++]);
    const get = (name) => this.column(`table_change.${name}`)[next.change];
    for (let i = 0; i < changes; i++, next.change++) {
      const { ids, holes } = groups[get("group")];
      if (get("is_removed")) holes.push([step, get("value")]);
      else ids.push(get("value"));
    }
    for (const { ids, lengths } of groups) {
      if (ids.length !== (lengths.at(-1)?.[1] ?? 0)) lengths.push([step, ids.length]);
    }
  }

  indexEvents(step, codes) {
    const [from, to] = this.span("event", step);
    for (let e = from; e < to; e++) {
      const kind = codes.events[this.column("event.kind")[e]];
      const request = this.requests[this.column("event.request")[e]];
      // Of a request that waits in the first step that is here, only its return tells that it was preempted before.
      if (kind === "resume" && request.changes.length) request.changes.at(-1).state = "preempted";
      if (kind === "admit") request.numBefore ??= 0;
      request.changes.push({ step, state: STATE_AFTER[kind] });
      if (kind === "admit" || kind === "resume") request.startsTable = step;
      if (kind === "preempt" && request.tables.length) request.tables.at(-1).closed = step;
      if (kind === "abort") {
        request.finishReason = "abort";
        this.hasAborts = true;
      }
      if (kind === "finish") request.finishReason = this.strings[this.column("event.reason")[e]] || "";
    }
  }

  // -- steps -----------------------------------------------------------------------------------------------------

  /** The array behind a column, longer than its contents; undefined before the first packet. */
  column(name) {
    return this.columns.get(name)?.data;
  }

  /** The entries [from, to) of a step in the columns of a kind, such as span("chunk", 12). */
  span(kind, step) {
    return [this.bounds[kind][step], this.bounds[kind][step + 1]];
  }

  /** The value of a step in a column, such as value("token_budget", 12). */
  value(name, step) {
    return this.columns.get(name).data[step];
  }

  /** The number of a step in its run; a view counts from 0, also in a trace that begins later. */
  label(step) {
    return step + (this.facts.first_step || 0);
  }

  numTokens(step) {
    return this.value("decode_tokens", step) + this.value("prefill_tokens", step);
  }

  /** Number of tokens that the decodes of a step gave; without recorded ids, all but rejected drafts count. */
  numDecoded(step) {
    return this.chunks(step).filter(({ decode }) => decode).reduce((sum, { index, n, sampled, drafts, accepted }) => {
      if (!this.tokensKnown) return sum + n - drafts + accepted;
      return sampled < 0 ? sum : sum + 1 + this.column("chunk.num_sampled_before")[index];
    }, 0);
  }

  duration(step) {
    return this.value("end", step) - this.value("time", step);
  }

  /** The sentence of a step, "" for none; it names requests as all else does. */
  sentence(step) {
    let sentence = this.sentences[step] ?? "";
    for (const request of this.requests) {
      if (!request.own || !sentence.includes(request.id)) continue;
      const id = request.id.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
      sentence = sentence.replace(new RegExp(`(?<![\\w-])${id}(?![\\w-])`, "g"), () => nameOf(request));
    }
    return sentence;
  }

  /** The phases of a step, in order: { name, begin, seconds }; `begin` is in seconds after that of the step. */
  phases(step) {
    const [from, to] = this.span("phase", step), get = (name, p) => this.column(`phase.${name}`)[p], result = [];
    for (let p = from; p < to; p++) {
      result.push({ name: this.strings[get("name", p)], begin: get("begin", p), seconds: get("seconds", p) });
    }
    return result;
  }

  /**
   * The clock of the run, in seconds, as workbench/trace/readings/run_clock.py has it: `duration` from the first step
   * to the last with `idle` time, `atWork` without it, and `before`, from the first arrival to the first step.
   */
  get clock() {
    if (!this.numSteps) return { duration: 0, idle: 0, atWork: 0, before: 0 };
    const begin = this.value("time", 0), duration = this.value("end", this.numSteps - 1) - begin;
    const idle = this.idleBetween(0, this.numSteps - 1), before = Math.max(0, begin - this.firstArrival());
    return { duration, idle, atWork: duration - idle, before };
  }

  /**
   * The moment from which times are stated, of all that are in the run's record: its first arrival, or its first step
   * if no arrival before that is known (workbench/trace/run_zero.py). Of a part, the host knows that of the whole.
   */
  get zero() {
    if (!this.numSteps) return 0;
    return this.facts.zero ?? this.keptZero ?? Math.min(this.value("time", 0), this.firstArrival());
  }

  /** Whether steps of the run are missing here: it is a part of a longer recording, or begins later. */
  get isPart() {
    return Boolean(this.facts.part) || this.label(0) > 0;
  }

  /** The first arrival, of any request: the engine may see them in another order; Infinity if step 0 is not here. */
  firstArrival() {
    if (this.label(0)) return Infinity;
    return this.requests.reduce((first, { arrival_time: time }) => Math.min(first, time ?? Infinity), Infinity);
  }

  /** Seconds of idle time between two steps. */
  idleBetween(first, last) {
    const pauses = this.afterPause.filter((step) => step > first && step <= last);
    return pauses.reduce((sum, step) => sum + this.value("time", step) - this.value("end", step - 1), 0);
  }

  /** Whether steps have times; those of a simulation have none. */
  timed() {
    return this.numSteps > 0 && this.value("end", this.numSteps - 1) > 0;
  }

  chunk(index) {
    const get = (name) => this.column(`chunk.${name}`)[index];
    const { codes } = this.facts, flags = get("flags");
    return {
      index,
      request: this.requests[get("request")],
      start: get("start"),
      n: get("num_tokens"),
      end: get("start") + get("num_tokens"),
      arm: ARMS[flags & 3],
      decode: (flags & 3) === 0,
      partial: (flags & codes.partial) > 0,
      limitedBy: codes.limits[flags >> codes.limit_shift],
      sampled: get("sampled"),
      cached: get("num_cached"),
      recomputed: get("num_recomputed"),
      drafts: get("num_drafts"),
      accepted: get("num_accepted"),
      miss: this.strings[get("miss")] || "",
    };
  }

  /** The chunks of a step in packed order, each with its query rows [q0, q1). */
  chunks(step) {
    const [from, to] = this.span("chunk", step), result = [];
    let q0 = 0;
    for (let c = from; c < to; c++) {
      const chunk = this.chunk(c);
      result.push({ ...chunk, seq: result.length, q0, q1: q0 + chunk.n });
      q0 += chunk.n;
    }
    return result;
  }

  events(step) {
    const [from, to] = this.span("event", step), result = [];
    const get = (name, e) => this.column(`event.${name}`)[e];
    for (let e = from; e < to; e++) {
      const kind = this.facts.codes.events[get("kind", e)], index = get("reason", e);
      const reason = (kind === "preempt" ? this.reasons[index]?.sentence : this.strings[index]) || "";
      const request = this.requests[get("request", e)];
      const words = kind === "finish" ? this.finishWords(request, reason) : reason;
      result.push({ step, kind, request, reason, words });
    }
    return result;
  }

  kernel(step) {
    return this.kernels[this.value("kernel", step)] || null;
  }

  /** Sliding window of a launch's first layer; without a launch of the group that is shown; 0 for full attention. */
  window(step) {
    return Math.max(0, this.kernel(step)?.windows?.[0] ?? this.groups[this.facts.layout_group]?.window ?? 0);
  }

  // -- requests at a step ----------------------------------------------------------------------------------------

  /** "waiting" | "running" | "preempted" | "finished" | "aborted", or "" before the request has arrived. */
  stateOf(request, step) {
    return lastAtOrBefore(request.changes, step, (entry) => entry.step)?.state ?? "";
  }

  /** Index into request.chunks of the last chunk at or before a step, -1 for none. */
  lastChunk(request, step) {
    return upperBound(request.chunkSteps, step) - 1;
  }

  /** The chunk of a request in a step, or null when it was not scheduled. */
  chunkIn(request, step) {
    const last = this.lastChunk(request, step);
    return last >= 0 && request.chunkSteps[last] === step ? this.chunk(request.chunks[last]) : null;
  }

  /** Number of output tokens of a request that the steps up to one gave, of those that are here. */
  numHere(request, step) {
    return upperBound(request.tokens, step, (token) => token.step);
  }

  /** Number of output tokens of a request up to a step, with those before the steps that are here; null if unknown. */
  numOutput(request, step) {
    return request.numBefore === null ? null : request.numBefore + this.numHere(request, step);
  }

  /** Number of output tokens of a request up to a step and the most that it may have: "8 of 40", or "up to 40". */
  outputOf(request, step) {
    const count = this.numOutput(request, step), most = formatNumber(request.max_tokens);
    return count === null ? `up to ${most}` : `${formatNumber(count)} of ${most}`;
  }

  /** The number of an output token as a reader counts, from 1; `index` is its place in `request.tokens`. */
  tokenNumber(request, index) {
    return request.numBefore + index + 1;
  }

  /** The KV position of an output token. */
  tokenPosition(request, index) {
    return request.num_prompt_tokens + request.numBefore + index;
  }

  /** The place in `request.tokens` of the token at a KV position; negative for one before the steps that are here. */
  tokenAt(request, position) {
    return position - request.num_prompt_tokens - (request.numBefore ?? Infinity);
  }

  /** Number of computed KV positions of a request after a step. */
  numComputed(request, step) {
    const last = this.lastChunk(request, step);
    return last >= 0 ? this.chunk(request.chunks[last]).end : request.computedBefore;
  }

  /** Number of KV positions of a request that any step before those that are here computed; null if it is not known. */
  everComputedBefore({ numBefore, num_prompt_tokens: prompt, everBefore }) {
    return everBefore ?? (numBefore ? prompt + numBefore - 1 : null);
  }

  /** The most likely tokens beside an output token, if they were recorded. */
  topTokens(request, number) {
    const { step } = request.tokens[number], place = number - request.tokens.findIndex((token) => token.step === step);
    const found = this.supplements.top_tokens.get(step)?.filter((top) => top.request === request.id);
    return found?.[place] || null;
  }

  /** Whether the ids of tokens are real: a recording may leave them out, and has zeros in their places. */
  get tokensKnown() {
    return this.facts.config?.token_ids_recorded !== false;
  }

  /** Whether any request has a text to read, or ids in its place. */
  get hasTexts() {
    return this.tokensKnown || this.requests.some((request) => request.hasText);
  }

  /** The text of an output token; one without any is named by its id, and as the end if the model ended with it. */
  tokenText(request, number) {
    const { text, id } = request.tokens[number];
    const ends = request.finishReason === "stop" && number === request.tokens.length - 1;
    if (!text && ends && this.requests.some(({ hasText }) => hasText)) return "⟨end of text⟩";
    return text || (this.tokensKnown ? `⟨token ${id}⟩` : "⟨not recorded⟩");
  }

  /** The id of an output token, or that it is unknown. */
  idWords(id) {
    return this.tokensKnown ? `id ${id}` : "its id is not recorded";
  }

  /** The reason for which a request finished, as words. */
  finishWords(request, reason = request.finishReason) {
    const count = this.numOutput(request, this.numSteps - 1);
    return endOf(reason, count !== null && count < request.max_tokens) || "";
  }

  /**
   * The step that computed a position of a request's KV: the latest up to `step`, else the first after it.
   * @returns Its `step`, and whether the position was `cached`: found in the prefix cache; null for none.
   */
  stepThatComputed(request, position, step) {
    const start = this.column("chunk.start"), count = this.column("chunk.num_tokens");
    const hits = this.column("chunk.num_cached");
    let found = null;
    for (let i = 0; i < request.chunks.length; i++) {
      const c = request.chunks[i], cached = position < start[c] && position < hits[c];
      if (!cached && (position < start[c] || position >= start[c] + count[c])) continue;
      if (found && request.chunkSteps[i] > step) break;
      found = { step: request.chunkSteps[i], cached };
    }
    return found;
  }

  /** Steps from the token before (or the arrival) to an output token. */
  latencySteps(request, number) {
    const { step } = request.tokens[number];
    if (number > 0) return step - request.tokens[number - 1].step;
    if (request.tokenBefore !== null) return step - request.tokenBefore;
    if (request.numBefore) return NaN; // the token before is not known
    return this.label(step) + 1 - request.arrival_step;
  }

  /** The KV cache groups: { kind, block_size, window }. */
  get groups() {
    return this.facts.groups || [];
  }

  /** Whether a request may hold KV after the scheduling of a step: blocks are freed after the step that finishes it. */
  holdsKv(request, step) {
    const last = lastAtOrBefore(request.changes, step, (entry) => entry.step), state = last?.state;
    return state === "finished" ? last.step === step : state !== "aborted" && state !== "preempted";
  }

  /**
   * The block table of a request after the scheduling of a step, as physical block ids in logical order, 0 for a place
   * that is not held.
   * @param group The KV cache group; by default the first one of attention, whose slots the other panels show.
   */
  blockTable(request, step, group = this.facts.layout_group) {
    const table = lastAtOrBefore(request.tables, step, (entry) => entry.step);
    if (!table || (table.closed !== undefined && step >= table.closed)) return [];
    if (!this.holdsKv(request, step)) return [];
    const { ids, lengths, holes } = table.groups[group];
    const blocks = ids.slice(0, lastAtOrBefore(lengths, step, ([since]) => since)?.[1] ?? 0);
    for (const [since, place] of holes) {
      if (since > step) break;
      blocks[place] = 0;
    }
    return blocks;
  }

  /**
   * The blocks in use at a step by KV cache group.
   * @returns `places`, a map from a block to its { group, logical, requests }, and for each group the number of blocks
   *   `held` and of `holes`: places that are not held any more.
   */
  blocksByGroup(step) {
    if (this.byGroup?.step === step && this.byGroup.numSteps === this.numSteps) return this.byGroup;
    const places = new Map(), held = this.groups.map(() => 0), holes = this.groups.map(() => 0);
    for (const request of this.requests) {
      if (!request.tables.length) continue;
      this.groups.forEach((_, group) => {
        this.blockTable(request, step, group).forEach((block, logical) => {
          if (!block) holes[group]++;
          else if (places.has(block)) places.get(block).requests.push(request);
          else {
            places.set(block, { group, logical, requests: [request] });
            held[group]++;
          }
        });
      });
    }
    return (this.byGroup = { step, numSteps: this.numSteps, places, held, holes });
  }

  /**
   * The reason why a waiting request was left out of a step: its facts and its sentence, null if it is not known.
   * A view shows the sentence, and decides by the facts.
   */
  reasonOf(request, step) {
    const [from, to] = this.span("passed_over", step);
    for (let p = from; p < to; p++) {
      if (this.column("passed_over.request")[p] === request.index) {
        return this.reasons[this.column("passed_over.reason")[p]];
      }
    }
    return this.reasons[this.value("waiting_reason", step)] || null;
  }

  /** The sentence of that reason. */
  whyNot(request, step) {
    return this.reasonOf(request, step)?.sentence || "";
  }
}

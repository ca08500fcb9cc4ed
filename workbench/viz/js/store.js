// What a view knows of a trace: the columns of every step received so far, and how they are looked up.
// The columns are written by workbench/viz/layout/columns.py; their units are steps, tokens, KV positions and
// block ids, never pixels.

import { PoolHistory } from "./pool_history.js";

const TYPES = { d: Float64Array, f: Float32Array, i: Int32Array, H: Uint16Array, B: Uint8Array };

/** The step column that says how many entries of each kind a step has. */
const COUNTS = { chunk: "num_chunks", event: "num_events", passed_over: "num_passed_over", pool: "num_pool_changes", work: "num_work_items" };

/** A typed array that grows: `data` may be longer than `length`. */
export class Column {
  constructor(code) {
    this.data = new TYPES[code](256);
    this.length = 0;
  }
  append(values) {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const grown = new this.data.constructor(Math.max(needed, this.data.length * 2));
      grown.set(this.data.subarray(0, this.length));
      this.data = grown;
    }
    this.data.set(values, this.length);
    this.length = needed;
  }
}

/** Split a packet into its JSON header and its typed arrays (see layout/packet.py). */
export function decodePacket(view) {
  const bytes = view.byteOffset % 8 ? new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength))
    : new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const headerLength = new DataView(bytes.buffer, bytes.byteOffset, 4).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headerLength)));
  const arrays = {};
  let offset = 4 + headerLength;
  for (const [name, code, count] of header.columns) {
    const type = TYPES[code];
    arrays[name] = new type(bytes.buffer, bytes.byteOffset + offset, count);
    offset += Math.ceil((count * type.BYTES_PER_ELEMENT) / 8) * 8;
  }
  return { header, arrays };
}

export class Store {
  constructor() {
    this.reset();
  }

  reset() {
    this.numSteps = 0;
    this.facts = { config: {}, model: {}, codes: null, source: "" };
    this.requests = [];       // one object per request, in order of arrival
    this.byId = new Map();
    this.strings = [];
    this.kernels = [];
    this.shadows = new Map(); // step -> what a shadow launch of the Metal kernel found
    this.columns = new Map(); // "budget" or "chunk.start" -> Column
    this.bounds = { chunk: [0], event: [0], passed_over: [0], pool: [0], work: [0] };
    this.pool = new PoolHistory();
    this.endTime = new Column("d");
  }

  /**
   * Take in a packet, which may repeat steps that are here already.
   * @returns false when something before it is missing: the caller then asks for it.
   */
  append(packet) {
    const { header, arrays } = decodePacket(packet);
    if (header.facts) {
      // A run that forgets its oldest steps goes on in another trace, which begins later.
      if (this.numSteps && header.facts.first_step !== this.facts.first_step) this.reset();
      this.facts = header.facts;
      if (!this.pool.size) this.pool.resize(header.facts.num_blocks);
    }
    if (header.comparison) this.comparison = header.comparison;
    if (header.first_step > this.numSteps || header.first_request > this.requests.length
      || header.first_string > this.strings.length || header.first_kernel > this.kernels.length) return false;
    this.addRequests(header);
    this.strings.push(...header.strings.slice(this.strings.length - header.first_string));
    this.kernels.push(...header.kernels.slice(this.kernels.length - header.first_kernel));
    for (const [step, found] of header.shadows) this.shadows.set(step, found);
    const fresh = this.skipKnown(header, arrays);
    for (const [name, code] of header.columns) {
      if (!this.columns.has(name)) this.columns.set(name, new Column(code));
      this.columns.get(name).append(fresh[name]);
    }
    this.index(header, fresh);
    return true;
  }

  /** The arrays of a packet without the steps that are here already; the header's step count and texts follow. */
  skipKnown(header, arrays) {
    const known = Math.min(this.numSteps - header.first_step, header.num_steps);
    if (known <= 0) return arrays;
    const sum = (column, count) => column.subarray(0, count).reduce((a, b) => a + b, 0);
    const skip = {};
    for (const kind in COUNTS) skip[kind] = sum(arrays[COUNTS[kind]], known);
    skip.new_block = sum(arrays["chunk.num_new_blocks"], skip.chunk);
    const sampled = arrays["chunk.sampled"].subarray(0, skip.chunk).reduce((n, id) => n + (id >= 0), 0);
    header.texts = header.texts.slice(sampled);
    header.num_steps -= known;
    return Object.fromEntries(Object.entries(arrays).map(([name, column]) => {
      const dot = name.indexOf(".");
      return [name, column.subarray(dot < 0 ? known : skip[name.slice(0, dot)])];
    }));
  }

  addRequests(header) {
    for (const info of header.requests.slice(this.requests.length - header.first_request)) {
      const request = {
        ...info, index: this.requests.length,
        chunks: [],        // indices into the chunk columns
        chunkSteps: [],    // the step of each
        tokens: [],        // { step, text, id, chunk }
        tables: [],        // block tables: { step, ids, lengths: [[step, length], ...] }
        changes: [],       // { step, state } with state "waiting" | "running" | "preempted" | "finished" | "aborted"
        finishReason: "",
      };
      this.requests.push(request);
      this.byId.set(request.id, request);
      this.placeAtStart(request);
    }
  }

  /** Where a request stood before the first step, in a trace that begins in the middle of a run. */
  placeAtStart(request) {
    const { start } = this.facts;
    if (!start) return;
    const table = Object.hasOwn(start.tables, request.id) && start.tables[request.id];
    if (table) {
      request.tables.push({ step: 0, ids: [...table], lengths: [[0, table.length]] });
      request.changes.push({ step: 0, state: "running" });
    } else if (start.waiting.includes(request.id)) request.changes.push({ step: 0, state: "waiting" });
    else if (start.over.includes(request.id)) request.changes.push({ step: -1, state: "finished" });
  }

  /** Derive, once per step, what every panel would otherwise search for. */
  index(header, arrays) {
    const get = (name) => this.columns.get(name).data;
    const codes = this.facts.codes;
    let text = 0;
    let block = this.columns.has("new_block.id") ? this.columns.get("new_block.id").length - arrays["new_block.id"].length : 0;
    for (let k = 0; k < header.num_steps; k++) {
      const step = this.numSteps;
      for (const kind in COUNTS) this.bounds[kind].push(this.bounds[kind][step] + arrays[COUNTS[kind]][k]);
      let seconds = 0;
      for (const phase of codes.phases) seconds += arrays[`seconds_${phase}`][k];
      this.endTime.append([arrays.time[k] + seconds]);
      this.indexEvents(step, codes);
      for (let c = this.bounds.chunk[step]; c < this.bounds.chunk[step + 1]; c++) {
        const request = this.requests[get("chunk.request")[c]];
        request.chunks.push(c);
        request.chunkSteps.push(step);
        const newBlocks = get("chunk.num_new_blocks")[c];
        if (newBlocks) {
          const fresh = !request.tables.length || request.tables.at(-1).closed || request.startsTable === step;
          if (fresh) request.tables.push({ step, ids: [], lengths: [] });
          const table = request.tables.at(-1);
          for (let b = 0; b < newBlocks; b++) table.ids.push(get("new_block.id")[block++]);
          table.lengths.push([step, table.ids.length]);
        }
        if (get("chunk.sampled")[c] >= 0) {
          request.tokens.push({ step, chunk: c, id: get("chunk.sampled")[c], text: header.texts[text] });
          text++;
        }
      }
      this.pool.append(step, get, this.bounds.pool[step], this.bounds.pool[step + 1]);
      this.numSteps++;
    }
  }

  indexEvents(step, codes) {
    const get = (name) => this.columns.get(name).data;
    const becomes = { arrive: "waiting", admit: "running", resume: "running", preempt: "preempted", finish: "finished", abort: "aborted" };
    for (let e = this.bounds.event[step]; e < this.bounds.event[step + 1]; e++) {
      const kind = codes.events[get("event.kind")[e]];
      const request = this.requests[get("event.request")[e]];
      request.changes.push({ step, state: becomes[kind] });
      if (kind === "admit" || kind === "resume") request.startsTable = step;
      if (kind === "preempt" && request.tables.length) request.tables.at(-1).closed = step;
      if (kind === "finish" || kind === "abort") request.finishReason = kind === "abort" ? "abort" : this.strings[get("event.reason")[e]] || "";
    }
  }

  // -- looking things up ------------------------------------------------------------------------------------

  /** A step column's value, such as value("token_budget", 12). */
  value(name, step) {
    return this.columns.get(name).data[step];
  }

  /** The number of a step in its run; steps are counted from 0 here, also in a trace that begins later. */
  label(step) {
    return step + (this.facts.first_step || 0);
  }

  duration(step) {
    return this.endTime.data[step] - this.value("time", step);
  }

  timed() {
    return this.numSteps > 0 && this.endTime.data[this.numSteps - 1] > this.value("time", this.numSteps - 1);
  }

  chunk(index) {
    const get = (name) => this.columns.get(`chunk.${name}`).data[index];
    const codes = this.facts.codes;
    const flags = get("flags");
    return {
      index, request: this.requests[get("request")], start: get("start"), n: get("num_tokens"), end: get("start") + get("num_tokens"),
      arm: ["decode", "new_final", "intermediate", "cached_final"][flags & 3], decode: (flags & 3) === 0,
      partial: (flags & codes.partial) > 0, limitedBy: codes.limits[(flags >> codes.limit_shift) & 7],
      sampled: get("sampled"), cached: get("num_cached"), recomputed: get("num_recomputed"),
    };
  }

  /** The chunks of a step in packed order, each with its query rows [q0, q1). */
  chunks(step) {
    const result = [];
    let q0 = 0;
    for (let c = this.bounds.chunk[step]; c < this.bounds.chunk[step + 1]; c++) {
      const chunk = this.chunk(c);
      chunk.seq = result.length;
      chunk.q0 = q0;
      chunk.q1 = q0 += chunk.n;
      result.push(chunk);
    }
    return result;
  }

  events(step) {
    const result = [];
    const get = (name) => this.columns.get(`event.${name}`).data;
    for (let e = this.bounds.event[step]; e < this.bounds.event[step + 1]; e++) {
      result.push({
        step, kind: this.facts.codes.events[get("kind")[e]], request: this.requests[get("request")[e]],
        reason: this.strings[get("reason")[e]] || "",
      });
    }
    return result;
  }

  workItems(step) {
    const names = ["seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits"];
    const result = [];
    for (let w = this.bounds.work[step]; w < this.bounds.work[step + 1]; w++) {
      result.push(Object.fromEntries(names.map((name) => [name, this.columns.get(`work.${name}`).data[w]])));
    }
    return result;
  }

  kernel(step) {
    return this.kernels[this.value("kernel", step)] || null;
  }

  /** "waiting" | "running" | "preempted" | "finished" | "aborted", or "" before the request has arrived. */
  stateOf(request, step) {
    const change = lastAtOrBefore(request.changes, step, (c) => c.step);
    return change ? change.state : request.arrival_step <= this.label(step) ? "waiting" : "";
  }

  /** Index into request.chunks of the last chunk at or before a step, -1 for none. */
  lastChunk(request, step) {
    return upperBound(request.chunkSteps, step) - 1;
  }

  /** The block table of a request after the scheduling of a step, as physical block ids in logical order. */
  blockTable(request, step) {
    const table = lastAtOrBefore(request.tables, step, (t) => t.step);
    const state = this.stateOf(request, step);
    if (!table || (table.closed !== undefined && step >= table.closed)) return [];
    // A finished request still holds its blocks in the step that ends it: they go back after that step.
    if ((state === "finished" || state === "aborted") && lastAtOrBefore(request.changes, step, (c) => c.step).step < step) return [];
    if (state === "aborted") return [];
    return table.ids.slice(0, lastAtOrBefore(table.lengths, step, (l) => l[0])[1]);
  }

  /** Why a waiting request was left out of a step. */
  whyNot(request, step) {
    const get = (name) => this.columns.get(`passed_over.${name}`).data;
    for (let p = this.bounds.passed_over[step]; p < this.bounds.passed_over[step + 1]; p++) {
      if (get("request")[p] === request.index) return this.strings[get("reason")[p]];
    }
    return this.strings[this.value("waiting_reason", step)] || "";
  }
}

/** Number of leading entries of a sorted list that are <= x. */
export function upperBound(sorted, x, key = (v) => v) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(sorted[middle]) <= x) low = middle + 1; else high = middle;
  }
  return low;
}

export function lastAtOrBefore(sorted, x, key) {
  const n = upperBound(sorted, x, key);
  return n ? sorted[n - 1] : null;
}

// The run in equal stretches of time: arrivals, latencies and blocks of each.

/** A percentile of sorted values, interpolated as in workbench/trace/readings/metrics.py; NaN without values. */
export function percentile(sorted, percent) {
  if (!sorted.length) return NaN;
  const place = ((sorted.length - 1) * percent) / 100, index = Math.floor(place);
  const low = sorted[index], high = sorted[Math.min(index + 1, sorted.length - 1)];
  return low + (high - low) * (place - index);
}

/**
 * The same of times of which some, `open`, have not ended, as text: they count with their length so far, and as they
 * can only grow, a value that would then be larger is a lower bound. `Distribution` of that file has the same rule.
 */
export function boundOf(ended, open, percent, write) {
  const sorted = [...ended, ...open].sort((a, b) => a - b), value = write(percentile(sorted, percent));
  const grows = open.length && sorted[Math.ceil(((sorted.length - 1) * percent) / 100)] >= Math.min(...open);
  return grows ? `≥ ${value}` : value;
}

/** Number of requests that arrive in each of `count` equal stretches of time. */
export function arrivalsIn(store, from, to, count) {
  const arrivals = new Array(count).fill(0), width = (to - from) / count;
  for (const { arrival_time: time } of store.requests) {
    if (time >= from && time <= to) arrivals[stretchOf(time, from, width, count)]++;
  }
  return arrivals;
}

/** The stretch that a moment is in; the end belongs to the last one. */
const stretchOf = (time, from, width, count) => Math.min(count - 1, Math.floor((time - from) / width));

/**
 * Load, latencies and blocks of steps, from one time to another in seconds since the start of the trace.
 * @returns `bins`: stretches of `width` seconds, each with its `arrivals`, sorted `first` and `next` latencies, the
 *   largest `kv` and `waiting` (those that wait for step 0 included), `preemptions`, `aborts`, and of the prompts of
 *   requests that are admitted for the first time the tokens `queried` and those `hit` in the prefix cache; `whole` is
 *   one for all of them.
 */
export function binned(store, steps, times, count) {
  const [first, last] = steps, [from, to] = times;
  const width = (to - from) / count, bins = Array.from({ length: count }, empty), whole = empty();
  const at = (time) => stretchOf(time, from, width, count);
  arrivalsIn(store, from, to, count).forEach((number, i) => {
    bins[i].arrivals = number;
    whole.arrivals += number;
  });
  const ends = store.column("end").subarray(0, store.numSteps), pool = Math.max(1, store.pool.size - 1);
  addWaitingForStep0(store, from, to, at, bins, whole);
  for (let step = first; step <= last; step++) {
    const kv = 1 - store.value("free_blocks", step) / pool, waiting = store.value("num_waiting", step);
    for (let i = at(Math.max(from, store.value("time", step))); i <= at(Math.min(to, ends[step])); i++) {
      bins[i].kv = Math.max(bins[i].kv || 0, kv);
      bins[i].waiting = Math.max(bins[i].waiting || 0, waiting);
    }
    whole.kv = Math.max(whole.kv || 0, kv);
    whole.waiting = Math.max(whole.waiting || 0, waiting);
    for (const bin of [whole, bins[at(Math.min(to, ends[step]))]]) addStep(store, step, bin);
  }
  for (const bin of [whole, ...bins]) {
    bin.first.sort((a, b) => a - b);
    bin.next.sort((a, b) => a - b);
  }
  return { bins, whole, width };
}

/** Before the first step, the requests that have arrived wait for it. */
function addWaitingForStep0(store, from, to, at, bins, whole) {
  const first = Math.min(to, store.value("time", 0));
  if (store.label(0) || from >= first) return;
  for (const { arrival_time: arrival } of store.requests) {
    if (!(arrival < first)) continue;
    for (let i = at(Math.max(from, arrival)); i <= at(first); i++) bins[i].waiting = (bins[i].waiting || 0) + 1;
    whole.waiting = (whole.waiting || 0) + 1;
  }
}

const empty = () => ({
  arrivals: 0,
  first: [],
  next: [],
  kv: NaN,
  waiting: NaN,
  queried: 0,
  hit: 0,
  preemptions: 0,
  aborts: 0,
});

/** Add a step to a stretch. */
function addStep(store, step, bin) {
  const { codes } = store.facts,
    column = (name) => store.column(`chunk.${name}`),
    [from, to] = store.span("chunk", step);
  const latency = column("latency"), flags = column("flags"), cached = column("num_cached");
  const requests = column("request"), cachedOf = new Map();
  for (let c = from; c < to; c++) {
    if (!Number.isNaN(latency[c])) bin[flags[c] & codes.first_token ? "first" : "next"].push(latency[c]);
    cachedOf.set(requests[c], cached[c]);
  }
  const kinds = store.column("event.kind"), [first, last] = store.span("event", step);
  const named = store.column("event.request");
  for (let e = first; e < last; e++) {
    const kind = codes.events[kinds[e]];
    bin.preemptions += kind === "preempt";
    bin.aborts += kind === "abort";
    if (kind === "admit" && cachedOf.has(named[e])) {
      bin.queried += store.requests[named[e]].num_prompt_tokens;
      bin.hit += Math.min(cachedOf.get(named[e]), store.requests[named[e]].num_prompt_tokens);
    }
  }
}

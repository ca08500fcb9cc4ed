// The marks of a recording at a moment: the lanes, the cells of memory, watched values, and the history of a cell. They
// are read from the events; the painter and the tables show the same marks.
//
// A moment is the number of an instruction that has just taken place: the events of the lanes of a simdgroup that did
// the same at the same place.

import { KIND, LANES, reads, writes } from "./kernel_run_file.js";
import { turns } from "./kernel_run_launch.js";

const ACTIONS = {
  [KIND.LOAD]: "load",
  [KIND.STORE]: "store",
  [KIND.ATOMIC_LOAD]: "atomic",
  [KIND.ATOMIC_STORE]: "atomic",
  [KIND.ATOMIC_UPDATE]: "atomic",
  [KIND.BARRIER_WAIT]: "waits",
  [KIND.SIMDGROUP_BARRIER]: "simd",
  [KIND.SIMD_FUNCTION]: "simd",
  [KIND.WATCH]: "compute",
  [KIND.RETURN]: "returned",
  [KIND.FAULT]: "fault",
};

/** Number of threads of the threadgroup of an event. */
export function numThreads(run, event) {
  const { grid, threadgroup, threadgroups } = run.header, at = threadgroups[run.columns.group[event]];
  return threadgroup.reduce((total, size, axis) => total * Math.min(size, grid[axis] - at[axis] * size), 1);
}

/**
 * The action of every thread of the threadgroup at a moment.
 * @returns A list of { thread, simdgroup, lane, action, event }; `event` is that of the present instruction, or -1.
 *   Actions: those of ACTIONS; "diverged", alive while other lanes of its simdgroup act; "elsewhere", in a simdgroup
 *   whose turn it is not.
 */
export function laneMarks(run, now) {
  const { kind, thread, group, detail, active } = run.columns, present = run.first(now);
  const count = numThreads(run, present), marks = [];
  const standing = standingOf(run, now, count), simdgroup = thread[present] >> 5;
  const events = new Map();
  for (const event of run.eventsOf(now)) events.set(thread[event], event);
  const whole = kind[present] === KIND.BARRIER_PASSED;
  const together = kind[present] === KIND.SIMD_FUNCTION || kind[present] === KIND.SIMDGROUP_BARRIER;
  for (let t = 0; t < count; t++) {
    const lane = t % LANES, own = t >> 5 === simdgroup;
    let action = standing[t] || "elsewhere", event = -1;
    if (whole) action = "passed";
    else if (together && own && detail[present] >>> lane & 1) [action, event] = ["simd", present];
    else if (events.has(t)) [action, event] = [ACTIONS[kind[present]], events.get(t)];
    else if (own && !standing[t] && active[now]) action = "diverged";
    marks.push({ thread: t, simdgroup: t >> 5, lane, action, event, group: group[present] });
  }
  return marks;
}

/** For each thread "waits" or "returned" if that is its latest event, up to a moment; else "". */
function standingOf(run, now, count) {
  const { kind, thread } = run.columns, standing = Array(count).fill("");
  for (let i = run.lastBarrier(now); i <= now; i++) {
    const first = kind[run.first(i)];
    if (first !== KIND.BARRIER_WAIT && first !== KIND.RETURN) continue;
    for (const event of run.eventsOf(i)) standing[thread[event]] = ACTIONS[kind[event]];
  }
  return standing;
}

/**
 * The elements of an array that were read or written since the last barrier, up to a moment.
 * @returns A map from the element to { reads, writes, now }: numbers of accesses, and "read", "write" or "" for the
 *   access of the present instruction.
 */
export function cellMarks(run, now, array) {
  return new CellMarks(run, array).at(now).cells;
}

/** The same for one moment after another: moving on within a barrier looks at the new instructions alone. */
export class CellMarks {
  constructor(run, array) {
    this.run = run;
    this.array = array;
    this.barrier = -1;
    this.now = -1;
    this.cells = new Map();
    this.lit = [];
  }

  /** Move to a moment; `changed` says whether a mark differs from those of the moment before. */
  at(now) {
    const { run, array } = this, barrier = run.lastBarrier(now);
    this.changed = this.lit.length > 0;
    if (barrier !== this.barrier || now < this.now) {
      this.changed = true;
      this.cells = new Map();
      this.now = barrier - 1;
      this.barrier = barrier;
    }
    for (const cell of this.lit) cell.now = "";
    this.lit = [];
    for (let i = this.now + 1; i <= now; i++) {
      if (run.columns.array[run.first(i)] === array) this.add(i, i === now);
    }
    // A moment that is shown again: its own cells are lit once more.
    if (now === this.now && run.columns.array[run.first(now)] === array) this.light(now);
    this.now = now;
    return this;
  }

  add(instruction, isNow) {
    const { run, cells } = this, { kind } = run.columns;
    this.changed = true;
    for (const event of run.eventsOf(instruction)) {
      const [from, count] = run.span(event), isRead = reads(kind[event]), isWrite = writes(kind[event]);
      for (let element = from; element < from + count; element++) {
        let cell = cells.get(element);
        if (!cell) cells.set(element, cell = { reads: 0, writes: 0, now: "" });
        cell.reads += isRead;
        cell.writes += isWrite;
      }
    }
    if (isNow) this.light(instruction);
  }

  light(instruction) {
    const { run, cells } = this, isWrite = writes(run.columns.kind[run.first(instruction)]);
    for (const event of run.eventsOf(instruction)) {
      const [from, count] = run.span(event);
      for (let element = from; element < from + count; element++) {
        const cell = cells.get(element);
        cell.now = isWrite ? "write" : "read";
        this.lit.push(cell);
      }
    }
  }
}

/** The elements of an array that the recording touches at all, in ascending order. */
export function touched(run, array) {
  const elements = new Set(), { array: arrays } = run.columns;
  for (let event = 0; event < run.numEvents; event++) {
    if (arrays[event] !== array) continue;
    const [from, count] = run.span(event);
    for (let element = from; element < from + count; element++) elements.add(element);
  }
  return Uint32Array.from([...elements].filter((element) => element >= 0)).sort();
}

/**
 * Every access to elements [from, to) of an array, in the order of instructions.
 * @returns A list of { event, instruction, thread, group, access, values, file, line }.
 */
export function historyOf(run, array, from, to) {
  const { kind, thread, group, array: arrays, order } = run.columns, found = [];
  for (const event of order) {
    if (arrays[event] !== array) continue;
    const [first, count] = run.span(event);
    if (first >= to || first + count <= from) continue;
    const access = writes(kind[event]) ? "write" : "read", { file, line } = run.place(event);
    const values = run.valuesOf(event), instruction = run.instructionOf[event];
    found.push({ event, instruction, thread: thread[event], group: group[event], access, values, file, line, first });
  }
  return found;
}

/** The first and last reader and writer of elements [from, to) of an array; null for those that there are not. */
export function ends(run, array, from, to) {
  const history = historyOf(run, array, from, to);
  const of = (access) => history.filter((entry) => entry.access === access);
  const [reading, writing] = [of("read"), of("write")];
  return {
    firstRead: reading[0] || null,
    lastRead: reading.at(-1) || null,
    firstWrite: writing[0] || null,
    lastWrite: writing.at(-1) || null,
    reads: reading.length,
    writes: writing.length,
  };
}

/**
 * The latest access to an element up to a moment, in the threadgroup of that moment.
 * @returns An object with the `event` and the `value`, or null if there was none.
 */
export function latestAccess(run, now, array, element) {
  const { array: arrays, group } = run.columns, present = group[run.first(now)];
  for (let i = now; i >= 0; i--) {
    const first = run.first(i);
    if (group[first] !== present) break;
    if (arrays[first] !== array) continue;
    for (const event of run.eventsOf(i).toReversed?.() ?? [...run.eventsOf(i)].reverse()) {
      const [from, count] = run.span(event);
      if (element >= from && element < from + count) {
        return { event, value: run.valuesOf(event)[element - from] ?? null };
      }
    }
  }
  return null;
}

/** The place in `run.watches` of the latest instruction up to a moment that shows watched values; -1 for none. */
export function latestWatch(run, now) {
  if (!run.watches) {
    run.watches = [];
    for (let i = 0; i < run.size; i++) if (run.columns.kind[run.first(i)] === KIND.WATCH) run.watches.push(i);
  }
  let low = -1, high = run.watches.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.watches[middle] <= now) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * The latest values of watched variables, up to a moment.
 * @returns A list of { name, values }: for each thread its value, or undefined.
 */
export function watchedMarks(run, now) {
  const { thread, group } = run.columns, present = group[run.first(now)], found = new Map();
  for (let at = latestWatch(run, now); at >= 0; at--) {
    const i = run.watches[at], first = run.first(i), name = run.name(first);
    if (group[first] !== present) break;
    if (!found.has(name)) found.set(name, []);
    const values = found.get(name);
    for (const event of run.eventsOf(i)) values[thread[event]] ??= run.valuesOf(event);
  }
  return [...found].map(([name, values]) => ({ name, values })).sort((a, b) => a.name < b.name ? -1 : 1);
}

/** Number of events at each line of a text, by line. */
export function eventsPerLine(run, file) {
  const counts = new Map(), places = run.header.places;
  for (const place of run.columns.place) {
    if (places[place].file === file) counts.set(places[place].line, (counts.get(places[place].line) || 0) + 1);
  }
  return counts;
}

/**
 * The next moment, in a direction of 1 or -1, at which a way of stepping stops; the end if there is none. Lines are
 * compared at a depth of calls: at 0, functions that the kernel calls are stepped over.
 */
export function nextStop(run, now, way, direction, depth = Infinity) {
  const { thread, group } = run.columns, here = run.first(now), line = run.lineAt(here, depth);
  const isThere = (event) => {
    const other = run.lineAt(event, depth);
    return other.line === line.line && other.file === line.file && thread[event] >> 5 === thread[here] >> 5;
  };
  const stops = {
    instruction: () => true,
    line: (event) => !isThere(event),
    again: isThere,
    simdgroup: (event) => thread[event] >> 5 === thread[here] >> 5 && group[event] === group[here],
    tile: (event, i) => Boolean(turns(run)[i]) && thread[event] >> 5 === thread[here] >> 5,
    barrier: (_, i) => run.startsAnew(i),
    threadgroup: (event, i) => i === 0 || group[event] !== group[run.first(i - 1)],
  };
  for (let i = now + direction; i >= 0 && i < run.size; i += direction) if (stops[way](run.first(i), i)) return i;
  return direction > 0 ? run.size - 1 : 0;
}

/** One sentence about a moment. */
export function sentence(run, now) {
  const { kind, thread } = run.columns, event = run.first(now), count = run.eventsOf(now).length;
  const simdgroup = thread[event] >> 5, lanes = count === 1 ? `lane ${thread[event] % LANES}` : `${count} lanes`;
  const who = `simdgroup ${simdgroup}, ${lanes}`, array = run.arrayOf(event);
  switch (kind[event]) {
    case KIND.BARRIER_PASSED:
      return "All threads pass the threadgroup barrier";
    case KIND.BARRIER_WAIT:
      return `${who}: arrive at the threadgroup barrier`;
    case KIND.SIMDGROUP_BARRIER:
    case KIND.SIMD_FUNCTION:
      return `simdgroup ${simdgroup}: ${run.name(event)}`;
    case KIND.WATCH:
      return `${who}: ${run.name(event)} = ${valueText(run.valuesOf(event))}${count > 1 ? " and so on" : ""}`;
    case KIND.RETURN:
      return `${who}: return`;
    case KIND.FAULT:
      return `${who}: ${run.name(event)}`;
  }
  const elements = [...run.eventsOf(now)].map((one) => run.span(one));
  const from = Math.min(...elements.map(([first]) => first)), to = Math.max(...elements.map(([a, n]) => a + n)) - 1;
  const what = writes(kind[event]) ? "store to" : "load from";
  return `${who}: ${what} ${array.name}[${position(array, from)}]${to > from ? ` to [${position(array, to)}]` : ""}`;
}

/** Values as a short text. */
export function valueText(values) {
  const short = (value) => Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return values.length === 1 ? short(values[0]) : `(${values.map(short).join(", ")})`;
}

/** The same, "" for no values. */
export const valueOrNothing = (values) => values.length ? valueText(values) : "";

/** An element of an array as the kernel's host would index it. */
export function position({ shape }, element) {
  return shape.length > 1 ? indices(shape, element).join(", ") : String(element);
}

/** The indices (one per axis) of an element of a shape. */
export function indices(shape, element) {
  const found = [];
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    found.unshift(axis ? element % shape[axis] : element);
    element = Math.floor(element / shape[axis]);
  }
  return found;
}

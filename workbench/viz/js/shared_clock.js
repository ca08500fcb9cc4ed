// One clock for two runs beside each other: a moment has one place in both, so that the same request arrives at one
// place. Only a pause of both is left out, and as in the clock of one run (store.js) it stays visible: it is as long as
// the step before it. Moments are seconds since the zero of each run, which is its first arrival.

import { upperBound } from "./sorted.js";
import { IDLE_SECONDS } from "./store.js";

export class SharedClock {
  constructor(stores) {
    const spans = stores.flatMap(spansOf).sort(([a], [b]) => a - b), [[from, first]] = spans;
    this.from = from;
    this.pauses = []; // each with the moments `from` and `to`, and the seconds of it that are `shown`
    let end = first, length = first - from;
    for (const [begin, until] of spans) {
      const gap = begin - end;
      if (gap > IDLE_SECONDS) this.pauses.push({ from: end, to: begin, shown: Math.min(gap, length) });
      if (until < end) continue;
      end = until;
      length = until - begin;
    }
    this.ends = this.pauses.map(({ to }) => to);
    this.cuts = [0]; // the seconds that the first pauses leave out
    for (const { from, to, shown } of this.pauses) this.cuts.push(this.cuts.at(-1) + to - from - shown);
    /** Beginnings and ends of the steps of each run, on this clock. */
    this.times = new Map(stores.map((store) => {
      const times = spansOf(store).map((span) => span.map((moment) => this.at(moment)));
      const column = (side) => Float64Array.from(times, (span) => span[side]);
      return [store, { starts: column(0), ends: column(1) }];
    }));
    this.end = this.at(end);
  }

  /** The time on this clock of a moment; one that is left out has that of the end of what is shown of its pause. */
  at(moment) {
    const past = upperBound(this.ends, moment), next = this.pauses[past];
    return Math.min(moment, next ? next.from + next.shown : Infinity) - this.cuts[past] - this.from;
  }

  /** Whether there is no place for a moment, because nothing ran. */
  leavesOut(moment) {
    const next = this.pauses[upperBound(this.ends, moment)];
    return Boolean(next) && moment > next.from + next.shown;
  }

  /** The moment of a time on this clock. */
  moment(time) {
    let past = 0;
    while (past < this.pauses.length && time >= this.at(this.pauses[past].to)) past++;
    return time + this.cuts[past] + this.from;
  }

  /** The moments between pauses from one time on this clock to another, and the seconds of the pauses. */
  stretches(from, to) {
    const stretches = [[this.moment(from), this.moment(to)]];
    let leftOut = 0;
    for (const pause of this.pauses) {
      const last = stretches.at(-1);
      if (pause.from < last[0] || pause.to > last[1]) continue;
      leftOut += pause.to - pause.from;
      stretches.push([pause.to, last[1]]);
      last[1] = pause.from;
    }
    return { stretches, leftOut };
  }
}

/** Begin and end of each step, as moments. */
function spansOf(store) {
  const { zero } = store, place = (step) => [store.value("time", step) - zero, store.value("end", step) - zero];
  return Array.from({ length: store.numSteps }, (_, step) => place(step));
}

/** The clocks by the second run, each with the numbers of steps that it was made of. */
const kept = new WeakMap();

/** The clock of two runs with times. */
export function sharedClock(a, b) {
  const known = kept.get(b), sizes = [a.numSteps, b.numSteps, a.zero, b.zero];
  if (known?.a === a && known.sizes.every((size, i) => size === sizes[i])) return known.clock;
  const clock = new SharedClock([a, b]);
  kept.set(b, { a, sizes, clock });
  return clock;
}

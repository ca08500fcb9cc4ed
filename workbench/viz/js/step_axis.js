// The horizontal axis that several panels share: pixels of a step (or of its time), and the step at a pixel.

import { sharedClock } from "./shared_clock.js";
import { upperBound } from "./sorted.js";
import { stretchTicks } from "./time_axis.js";

/** Widths in pixels from which there is room for numbers and a legend at the right of the axis, and for long names. */
const WIDE = 620, NARROW = 430;

/** Left and right margins of the panels on the step axis, so that a step has the same x in all of them. */
export function marginOf(width) {
  return { left: width < NARROW ? 68 : 84, right: width < WIDE ? 20 : 176 };
}

/** Whether the right margin has room for words. */
export function hasRoomAtRight(width) {
  return width >= WIDE;
}

export class StepAxis {
  constructor(store, cursor, width) {
    const margin = marginOf(width);
    this.store = store;
    this.from = cursor.range[0];
    this.to = cursor.range[1];
    this.x0 = margin.left;
    this.x1 = width - margin.right;
    this.byTime = cursor.byTime;
    // An outlined run may be longer than this one: an axis that shows all of one shows all of both.
    const beside = cursor.rangeMode === "fit" ? cursor.beside : null;
    if (!this.byTime) {
      this.to = Math.max(this.to, beside?.numSteps ?? 0);
      return;
    }
    // Beside another run, both have one clock.
    this.shared = cursor.beside?.timed() ? sharedClock(store, cursor.beside) : null;
    const last = Math.min(store.numSteps, Math.ceil(this.to)) - 1, { starts, ends } = this.timesOf(store);
    this.t0 = starts[Math.max(0, Math.floor(this.from))];
    this.t1 = Math.max(ends[Math.max(0, last)], this.t0 + 1e-9);
    if (beside?.timed()) {
      const times = this.timesOf(beside);
      if (this.first === 0) this.t0 = Math.min(this.t0, times.starts[0]);
      this.t1 = Math.max(this.t1, times.ends[beside.numSteps - 1]);
    }
    // While more steps are expected the axis has some room, so that it moves only now and then.
    if (cursor.growing) {
      const room = 2 ** (Math.floor(Math.log2(this.t1 - this.t0)) - 2);
      this.t1 = this.t0 + Math.ceil((this.t1 - this.t0) / room) * room;
    }
  }

  /** The first visible step. */
  get first() {
    return Math.max(0, Math.floor(this.from));
  }

  /** One more than the last visible step. */
  get last() {
    return Math.min(this.store.numSteps, Math.ceil(this.to));
  }

  /** Beginnings and ends of the steps of a run on the clock of this axis. */
  timesOf(store) {
    return this.shared?.times.get(store) ?? { starts: store.clockStart.data, ends: store.clockEnd.data };
  }

  get stepWidth() {
    return (this.x1 - this.x0) / (this.to - this.from);
  }

  /** Left edge of a step. */
  x(step) {
    if (!this.byTime) return this.x0 + (step - this.from) * this.stepWidth;
    const n = this.store.numSteps, { starts, ends } = this.timesOf(this.store);
    return this.xOfTime(step < n ? starts[Math.max(0, step)] : ends[n - 1]);
  }

  /** Right edge of a step. */
  end(step) {
    return this.byTime ? this.xOfTime(this.timesOf(this.store).ends[step]) : this.x(step + 1);
  }

  xOfTime(time) {
    return this.x0 + ((time - this.t0) / (this.t1 - this.t0)) * (this.x1 - this.x0);
  }

  /** The visible steps between pauses, as times since the zero of the run, and the seconds of the pauses. */
  get stretches() {
    if (this.shared) return this.shared.stretches(this.t0, this.t1);
    const { store } = this, { zero } = store, stretches = [], last = Math.max(this.first, this.last - 1);
    let from = this.first;
    for (const step of [...store.afterPause.filter((step) => step > this.first && step <= last), last + 1]) {
      stretches.push([store.value("time", from) - zero, store.value("end", step - 1) - zero]);
      from = step;
    }
    stretches.at(-1)[1] += Math.max(0, this.t1 - store.clockEnd.data[last]);
    return { stretches, leftOut: store.idleBetween(this.first, last) };
  }

  /** Round times of the visible stretches, with the seconds left out between them and the function that writes each. */
  timeTicks(count) {
    const { stretches, leftOut } = this.stretches, xOf = (moment) => this.xOfMoment(moment);
    return { leftOut, ...stretchTicks(stretches, this.t1 - this.t0, count, xOf, this.x1) };
  }

  /** The pixel of a time since the zero of the run; null for one that is left out, because nothing ran. */
  xOfMoment(moment) {
    const { shared } = this;
    if (shared) return shared.leavesOut(moment) ? null : this.xOfTime(shared.at(moment));
    const { store } = this, n = store.numSteps, times = store.column("time").subarray(0, n);
    const time = moment + store.zero;
    const step = Math.max(0, upperBound(times, time) - 1), end = store.value("end", step);
    const start = store.clockStart.data[step], after = store.clockEnd.data[step];
    if (time <= end) return this.xOfTime(start + Math.min(time - times[step], after - start));
    const next = step + 1 < n ? store.clockStart.data[step + 1] : Infinity, at = after + time - end;
    return at <= next ? this.xOfTime(at) : null;
  }

  /** The step at a pixel, -1 for none. */
  stepAt(x) {
    if (x < this.x0 - 4 || x > this.x1 + 4) return -1;
    const n = this.store.numSteps;
    let step = Math.floor(this.from + (x - this.x0) / this.stepWidth);
    if (this.byTime) {
      const time = this.t0 + ((x - this.x0) / (this.x1 - this.x0)) * (this.t1 - this.t0);
      step = upperBound(this.timesOf(this.store).starts.subarray(0, n), time) - 1;
      if (x > this.end(n - 1) + 4) return -1;
    }
    return step >= 0 && step < n ? step : -1;
  }

  /** Draw something that belongs to steps, and nothing outside the axis but the marks at its right end. */
  clipped(context, height, draw) {
    context.save();
    context.beginPath();
    context.rect(this.x0 - 1, 0, this.x1 - this.x0 + 9, height);
    context.clip();
    draw();
    context.restore();
  }
}

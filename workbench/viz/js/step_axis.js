// The horizontal axis that several panels share.

/** Left and right margins of the panels that share the step axis, so that a step stands at the same x in all. */
export const MARGIN = { left: 84, right: 176 };

/** The shared horizontal axis of steps (or of time): pixels of a step, and the step at a pixel. */
export class StepAxis {
  constructor(store, cursor, width, margin = MARGIN) {
    this.store = store;
    [this.from, this.to] = cursor.range;
    this.x0 = margin.left;
    this.x1 = width - margin.right;
    this.byTime = cursor.axis === "time" && store.timed();
    if (this.byTime) {
      const last = Math.min(store.numSteps, Math.ceil(this.to)) - 1;
      this.t0 = store.value("time", Math.max(0, Math.floor(this.from)));
      this.t1 = Math.max(store.endTime.data[Math.max(0, last)], this.t0 + 1e-9);
    }
  }
  get stepWidth() { return (this.x1 - this.x0) / (this.to - this.from); }
  x(step) {
    if (!this.byTime) return this.x0 + (step - this.from) * this.stepWidth;
    const n = this.store.numSteps;
    const t = step < n ? this.store.value("time", Math.max(0, step)) : this.store.endTime.data[n - 1];
    return this.x0 + ((t - this.t0) / (this.t1 - this.t0)) * (this.x1 - this.x0);
  }
  /** Right edge of a step's mark. */
  end(step) {
    if (!this.byTime) return this.x(step + 1);
    return this.x0 + ((this.store.endTime.data[step] - this.t0) / (this.t1 - this.t0)) * (this.x1 - this.x0);
  }
  stepAt(x) {
    if (x < this.x0 - 4 || x > this.x1 + 4) return -1;
    const n = this.store.numSteps;
    let step;
    if (this.byTime) {
      const t = this.t0 + ((x - this.x0) / (this.x1 - this.x0)) * (this.t1 - this.t0);
      let low = 0, high = n;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.store.value("time", middle) <= t) low = middle + 1; else high = middle;
      }
      step = low - 1;
    } else {
      step = Math.floor(this.from + (x - this.x0) / this.stepWidth);
    }
    return step >= 0 && step < n ? step : -1;
  }
  get first() { return Math.max(0, Math.floor(this.from)); }
  get last() { return Math.min(this.store.numSteps, Math.ceil(this.to)); }
}

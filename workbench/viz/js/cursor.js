// The state that all panels of a view share: the step at the cursor, the hovered object, and the visible part of the
// step axis. Panels read it when they draw and change it through its methods; the view redraws once per frame.

/** Maximum number of visible steps on an axis of time. */
const MOST_TIMED_STEPS = 2000;

export class Cursor {
  /**
   * @param store
   * @param {(what: string) => void} onChange Called with "step", "hover", "range", "select" or "grown".
   */
  constructor(store, onChange) {
    this.store = store;
    this.onChange = onChange;
    this.step = 0;
    this.follow = true; // stay on the newest step
    this.playing = false;
    this.speed = 8; // steps per second when playing
    this.hover = {}; // { request, block, chunk, kv: [k0, k1], item, step }
    this.selected = null; // index of the request whose q x kv rectangle is shown
    this.range = [0, 1]; // visible steps [from, to)
    this.rangeMode = "fit"; // "fit" all steps | "window" of the last ones | "manual"
    this.axis = "time"; // "step" | "time", which needs a trace with times
    this.live = false; // more steps are expected
    this.beside = null; // the store of a run that is outlined over this one
    this.filter = "";
  }

  get last() {
    return Math.max(0, this.store.numSteps - 1);
  }

  get scrubbed() {
    return this.step < this.last;
  }

  /** Whether the axis shows times. It does not where a column of pixels stands for many steps. */
  get byTime() {
    return this.axis === "time" && this.store.timed() && this.range[1] - this.range[0] <= MOST_TIMED_STEPS;
  }

  /** Whether the end of the axis moves with new steps. */
  get growing() {
    return this.live && this.rangeMode !== "manual";
  }

  /** Whether the filter lets a request through. */
  matches(request) {
    return !this.filter || request.id.toLowerCase().includes(this.filter.toLowerCase());
  }

  /** New steps have arrived. */
  grown() {
    const before = this.range, step = this.step;
    if (this.follow) this.step = this.last;
    this.fitRange();
    this.onChange(before[0] === this.range[0] && before[1] === this.range[1] ? "grown" : "range");
    if (this.step !== step) this.onChange("step");
  }

  /** The first steps are gone: the same step has a smaller number now. */
  forget(count) {
    const width = this.range[1] - this.range[0];
    const from = Math.max(0, this.range[0] - count);
    this.range = [from, from + width];
    this.step = Math.max(0, this.step - count);
    this.hover = {};
    this.selected = null;
  }

  /** Show a recording at its first step that mixes prefill and decode: that picture shows the most. */
  openRecording() {
    const { store } = this;
    this.follow = false;
    for (let step = 0; step < store.numSteps; step++) {
      if (!store.value("decode_tokens", step) || !store.value("prefill_tokens", step)) continue;
      this.step = step;
      return;
    }
  }

  // -- moving ----------------------------------------------------------------------------------------------------

  seek(step, { keepFollow = false, stay = false } = {}) {
    const target = Math.max(0, Math.min(this.last, Math.round(step)));
    if (!keepFollow) this.follow = target === this.last && !this.playing && !stay;
    if (target === this.step) return this.onChange("step");
    this.step = target;
    if (target < this.range[0] || target >= this.range[1]) {
      const width = this.range[1] - this.range[0];
      const from = Math.max(0, Math.min(target - width / 2, this.last + 1 - width));
      this.range = [from, from + width];
      this.rangeMode = "manual";
      this.onChange("range");
    }
    this.onChange("step");
  }

  /** Go to the newest step and follow it. */
  toLive() {
    this.playing = false;
    this.follow = true;
    if (this.rangeMode === "manual") this.rangeMode = "window";
    this.step = this.last;
    this.fitRange();
    this.onChange("range");
    this.onChange("step");
  }

  /** Go to the next (or previous) step in which something happened to a request. */
  seekEvent(direction) {
    for (let step = this.step + direction; step >= 0 && step < this.store.numSteps; step += direction) {
      const [from, to] = this.store.span("event", step);
      if (to > from) return this.seek(step);
    }
  }

  togglePlay() {
    this.playing = !this.playing;
    if (!this.playing) return;
    this.follow = false;
    if (this.step >= this.last) this.seek(0);
    this.play();
  }

  /** Advance at `speed` until the last step, or until a person stops it. */
  play() {
    const started = performance.now(), from = this.step;
    const tick = () => {
      if (!this.playing) return;
      const target = from + ((performance.now() - started) / 1000) * this.speed;
      if (target >= this.last) {
        this.playing = false;
        this.seek(this.last);
        return;
      }
      if (Math.floor(target) !== this.step) this.seek(Math.floor(target), { keepFollow: true });
      requestAnimationFrame(tick);
    };
    tick();
  }

  // -- hover and selection ----------------------------------------------------------------------------------------

  setHover(hover) {
    const same = (a, b) => a === b || (Array.isArray(a) && Array.isArray(b) && a.every((v, i) => v === b[i]));
    const keys = ["request", "block", "chunk", "kv", "item", "step"];
    if (keys.every((key) => same(this.hover[key], hover[key]))) return;
    this.hover = hover;
    this.onChange("hover");
  }

  /** Select a request, or no request when it is the selected one. */
  select(request) {
    this.selected = this.selected === request ? null : request;
    this.onChange("select");
  }

  // -- the visible part of the step axis -------------------------------------------------------------------------

  fitRange() {
    const n = Math.max(1, this.store.numSteps);
    if (this.rangeMode === "fit") this.range = [0, Math.max(this.withRoom(n, n), 12)];
    if (this.rangeMode === "window") {
      const width = Math.min(this.range[1] - this.range[0], Math.max(n, 12));
      const to = Math.max(width, this.withRoom(n, width));
      this.range = [to - width, to];
    }
  }

  /** End of the axis for n steps: while more are expected it leaves room, so that the axis moves only now and then. */
  withRoom(n, width) {
    const room = 2 ** Math.max(0, Math.floor(Math.log2(width)) - 3);
    return this.live ? Math.ceil(n / room) * room : n;
  }

  fit() {
    this.rangeMode = "fit";
    this.fitRange();
    this.onChange("range");
  }

  zoom(factor, around = this.step + 0.5) {
    const [from, to] = this.range;
    const n = Math.max(12, this.store.numSteps);
    const width = Math.max(6, Math.min(n, (to - from) * factor));
    const share = (around - from) / (to - from);
    this.moveTo(around - width * share, width);
  }

  /** The visible steps that a person has chosen, as numbers of the run; null for all, and for the last ones. */
  get chosenRange() {
    if (this.rangeMode !== "manual") return null;
    return this.range.map((step) => Math.round(1000 * (step + this.store.label(0))) / 1000);
  }

  /** Show a range that the host names, or all steps. */
  showRange(range) {
    if (!range) return this.rangeMode === "manual" && this.fit();
    const [from, to] = range, width = Math.max(6, Math.min(Math.max(12, this.store.numSteps), to - from));
    this.moveTo((from + to - width) / 2 - this.store.label(0), width);
  }

  pan(steps) {
    this.moveTo(this.range[0] + steps, this.range[1] - this.range[0]);
  }

  moveTo(from, width) {
    const n = Math.max(12, this.store.numSteps);
    const start = Math.max(0, Math.min(from, n - width));
    this.range = [start, start + width];
    if (start <= 0 && width >= n) this.rangeMode = "fit";
    else this.rangeMode = start + width >= n ? "window" : "manual";
    this.onChange("range");
  }
}

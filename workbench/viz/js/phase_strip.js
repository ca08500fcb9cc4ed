// The phases of the step at the cursor on an axis of time: an asynchronous step is scheduled before it begins. Phases
// that overlap stand below each other.

import { formatSeconds, h, plain, replace } from "./dom.js";

/** Phases in order of their beginnings, each with the first lane that is free by then, and its place in [0, 1]. */
export function placed(phases) {
  const ends = [], begins = phases.map(({ begin }) => begin);
  const first = Math.min(...begins), last = Math.max(...phases.map(({ begin, seconds }) => begin + seconds));
  // Places are rounded to single precision, and neighbours must not overlap by that.
  const span = last - first || 1, rounding = span * 1e-4;
  return [...phases].sort((a, b) => a.begin - b.begin).map((phase) => {
    const free = ends.findIndex((end) => end <= phase.begin + rounding), lane = free < 0 ? ends.length : free;
    ends[lane] = phase.begin + phase.seconds;
    return { ...phase, lane, left: (phase.begin - first) / span, width: phase.seconds / span };
  });
}

export class PhaseStrip {
  constructor(view) {
    this.view = view;
    this.element = h("ol", { class: "wb-phases", "aria-label": "Phases of the step at the cursor", hidden: true });
  }

  update() {
    const { store, cursor } = this.view, { step } = cursor, phases = store.numSteps ? store.phases(step) : [];
    this.element.hidden = !phases.length || !store.timed();
    const shown = JSON.stringify(phases); // another run has other phases in a step of the same number
    if (this.element.hidden || this.shown === shown) return;
    this.shown = shown;
    const bar = ({ name, begin, seconds, lane, left, width }) => {
      const words = `${plain(name, 20)} ${formatSeconds(seconds)}`;
      const from = begin < 0 ? `${formatSeconds(-begin)} before the step` : `${formatSeconds(begin)} into the step`;
      const style = `--wb-lane:${lane};--wb-left:${left};--wb-share:${width}`;
      return h("li", { style, title: `${words}, from ${from}` }, words);
    };
    const bars = placed(phases);
    this.element.style.setProperty("--wb-lanes", String(1 + Math.max(...bars.map(({ lane }) => lane))));
    replace(this.element, bars.map(bar));
  }
}

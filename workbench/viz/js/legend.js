// Legends: small samples of the marks in a panel, each with its name. A mark is a function (context, x) that draws
// from x on, centred on y = 0.

import { h } from "./dom.js";
import { clearedContext, hatch, SMALL, text, textWidth } from "./drawing.js";

export const box = (colour, width, height) => (context, x) => {
  context.fillStyle = colour;
  context.fillRect(x, -height / 2, width, height);
};

export const frame = (colour, width, height) => (context, x) => {
  context.strokeStyle = colour;
  context.strokeRect(x + 0.5, 0.5 - height / 2, width - 1, height - 1);
};

export const hatched = (colour, width, height) => (context, x) =>
  hatch(context, x, -height / 2, width, height, colour, 4);

export const dashed = (colour, width, dash) => (context, x) => {
  context.strokeStyle = colour;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x, 0.5);
  context.lineTo(x + width, 0.5);
  context.stroke();
  context.setLineDash([]);
};

/** Several marks on top of each other. */
export const layers = (...marks) => (context, x) => {
  for (const mark of marks) mark(context, x);
};

/** Draw the mark of an entry at x, centred on y, and its name at `textX`. */
export function legendEntry(context, { name, mark }, x, y, textX, colour) {
  context.save();
  context.translate(0, y);
  mark(context, x);
  context.restore();
  text(context, name, textX, Math.ceil(y), colour, SMALL);
}

/** Draw entries side by side, each as wide as its `width`, as far as they fit before `right`. */
export function legendRow(context, entries, x, right, y, gap, colour) {
  for (const entry of entries) {
    if (x + entry.width > right) break;
    legendEntry(context, entry, x, y, x + 19, colour);
    x += entry.width + gap;
  }
}

const LINE = 16, GAP = 14, MARK = 19;

/** A legend in lines above a picture that has no room for one. */
export class LegendLines {
  constructor() {
    this.element = h("canvas", { class: "wb-legend", "aria-hidden": "true", hidden: true });
  }

  /** Draw the entries, in as many lines as they need, or hide it if there are none. A mark that changes has a `key`. */
  show(entries, width, colour) {
    this.element.hidden = !entries.length;
    const { devicePixelRatio } = globalThis, marks = entries.map(({ name, key }) => [name, key]);
    const signature = JSON.stringify([marks, width, colour, devicePixelRatio]);
    if (signature === this.signature) return;
    this.signature = signature; // also while it is hidden: WebKit may forget what a hidden canvas showed
    if (!entries.length) return;
    const measure = this.element.getContext("2d"), places = [];
    let x = 0, line = 0;
    for (const entry of entries) {
      const wide = MARK + textWidth(measure, entry.name, SMALL);
      if (x && x + wide > width) [x, line] = [0, line + 1];
      places.push([entry, x, line * LINE + LINE / 2]);
      x += wide + GAP;
    }
    const height = (line + 1) * LINE, ratio = globalThis.devicePixelRatio || 1;
    Object.assign(this.element, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    this.element.style.cssText = `width:${width}px;height:${height}px`;
    const context = clearedContext(this.element, 0, width, height);
    for (const [entry, left, y] of places) legendEntry(context, entry, left, y, left + MARK, colour);
  }
}

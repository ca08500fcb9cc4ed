// Legends: small samples of the marks in a panel, each with its name. A mark is a function (context, x) that draws
// from x on, centred on y = 0.

import { hatch, SMALL, text } from "./drawing.js";

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

// Paints the lanes and the cells of a recorded kernel.

import { LANES } from "./kernel_run_file.js";
import { inkOn } from "./theme.js";

export const LEFT = 74;
export const SMALL = "10px system-ui, sans-serif";
const MAX_LANE = 22, MIN_ROW = 13, GAP = 1;

export function contextOf(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  return context;
}

/**
 * A square for each lane, 32 to a row, with the letter of what it does.
 * @returns Where they are: { left, size, height, columns }.
 */
export function paintLanes(canvas, marks, theme, width) {
  const rows = Math.ceil(marks.length / LANES), size = Math.max(8, Math.min(MAX_LANE, (width - LEFT) / LANES));
  const height = Math.max(MIN_ROW, size), context = contextOf(canvas, width, rows * height + 1);
  for (let row = 0; row < rows; row++) {
    context.fillStyle = theme.colours.muted;
    context.font = SMALL;
    context.textAlign = "left";
    context.fillText(`simdgroup ${row}`, 0, row * height + height / 2);
  }
  context.textAlign = "center";
  context.font = size >= 14 ? "600 11px system-ui, sans-serif" : "8px system-ui, sans-serif";
  for (const { simdgroup, lane, action } of marks) {
    const { colour, letter } = theme.action(action), x = LEFT + lane * size, y = simdgroup * height;
    context.fillStyle = colour;
    context.fillRect(x, y, size - GAP, height - GAP);
    if (letter && size >= 9) {
      context.fillStyle = inkOn(colour);
      context.fillText(letter, x + (size - GAP) / 2, y + (height - GAP) / 2 + 0.5);
    }
  }
  return { left: LEFT, size, height, columns: LANES };
}

/**
 * Rows of cells: an outline for each element, filled if it was read or written since the barrier, strong if now.
 * @returns Where they are: { left, cell, height }.
 */
export function paintCells(canvas, { rows, columns, num, marks, theme, width, more }) {
  const cell = Math.max(1, Math.min(14, (width - LEFT) / columns)), height = Math.max(4, Math.min(12, cell * 1.2));
  const context = contextOf(canvas, width, rows.length * height + (more ? 16 : 2));
  const read = theme.action("load").colour, write = theme.action("store").colour, { colours } = theme;
  const gap = cell >= 4 ? GAP : 0, every = Math.max(1, Math.ceil(12 / height));
  context.font = SMALL;
  rows.forEach(({ row, label }, index) => {
    const y = index * height, first = row * columns, last = Math.min(columns, num - first);
    if (index % every === 0) {
      context.fillStyle = colours.muted;
      context.textAlign = "left";
      context.fillText(label, 0, y + height / 2, LEFT - 6);
    }
    context.fillStyle = colours.hairline;
    context.fillRect(LEFT, y, last * cell, height - 1);
    for (let column = 0; column < last; column++) {
      const mark = marks.get(first + column);
      if (!mark) continue;
      const isWrite = mark.now ? mark.now === "write" : mark.writes > 0;
      context.globalAlpha = mark.now ? 1 : 0.38;
      context.fillStyle = isWrite ? write : read;
      context.fillRect(LEFT + column * cell, y, cell - gap, height - 1);
    }
    context.globalAlpha = 1;
  });
  if (more) {
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText(more, LEFT, rows.length * height + 8);
  }
  return { left: LEFT, cell, height };
}

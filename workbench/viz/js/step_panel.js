// A panel on the shared step axis. Two things make it cheap to follow a running engine: while the axis stands still
// only the new steps are drawn, and the cursor is an element above the picture, so that moving it draws nothing at all.

import { h } from "./dom.js";
import { clearedContext } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { marginOf, StepAxis } from "./step_axis.js";

/** Pixels that the marks of a step may reach beyond its column. */
export const REACH = 8;

/** Maximum width of a tick's label in pixels. */
const LABEL = 110;

/** Maximum number of steps in the table of a panel. */
const TABLE_STEPS = 500;

export class StepPanel extends CanvasPanel {
  constructor(view, options) {
    super(view, options);
    this.cursorMark = h("div", { class: "wb-cursor", hidden: true });
    this.hoverMark = h("div", { class: "wb-cursor wb-cursor-hover", hidden: true });
    this.holder.append(this.hoverMark, this.cursorMark);
    this.strip = document.createElement("canvas");
    this.drawnSteps = 0;
    this.top = 0; // everything above it belongs to no step, such as a legend
  }

  needs(what) {
    return what !== "status" && what !== "pin";
  }

  changesPicture(what) {
    return what !== "hover" && what !== "step";
  }

  axis() {
    return new StepAxis(this.store, this.cursor, this.width);
  }

  /** Everything besides the axis that a whole picture depends on: when it changes, all steps are drawn again. */
  scale(_axis) {
    return null;
  }

  /** The overlay is at the right of the axis, for numbers that depend on the cursor. */
  overlayLeft() {
    return this.width - marginOf(this.width).right;
  }

  /** Bottom of the cursor line. */
  cursorBottom() {
    return this.height;
  }

  render(stale) {
    if (!this.width) this.resized();
    if (!this.width) return;
    if ([...stale].some((what) => this.changesPicture(what))) this.drawPicture(stale);
    if ([...stale].some((what) => what !== "hover")) {
      this.canvas.setAttribute("aria-label", `${this.title}: ${this.describe()}`);
    }
    this.placeCursor();
    if (this.showsOverlay()) this.drawOverlay(this.prepare(this.overlay, this.overlayLeft()), this.width, this.height);
  }

  drawPicture(stale) {
    this.layout();
    const { store, width, height } = this, axis = this.axis();
    const { from, to, byTime, t1 } = axis;
    const picture = JSON.stringify([from, to, byTime, t1, width, height, this.theme.name, this.scale(axis)]);
    const grown = picture === this.picture && store.numSteps > this.drawnSteps &&
      [...stale].every((what) => what === "grown" || !this.changesPicture(what));
    if (grown && this.drawnSteps > 0) this.drawNew(axis);
    else this.draw(this.prepare(this.canvas), axis, axis.first);
    this.picture = picture;
    this.drawnSteps = store.numSteps;
  }

  /**
   * Draw the columns from the last drawn step on, pixel for pixel as in a whole picture. They are drawn on a strip
   * first, because a mark that is cut by a clipping edge does not look quite like a whole one.
   */
  drawNew(axis) {
    const ratio = globalThis.devicePixelRatio || 1, pixels = (x) => Math.floor(x * ratio) / ratio;
    // The label of a new tick at the end begins before it.
    const left = pixels(Math.min(axis.x(this.drawnSteps - 1), axis.x1 - LABEL) - REACH);
    const right = Math.min(this.width, pixels(axis.x1 + REACH) + 1), width = right - left;
    let first = this.drawnSteps - 1;
    while (first > axis.first && axis.end(first - 1) + REACH >= left) first--;
    this.strip.width = Math.round((width + 2 * REACH) * ratio);
    this.strip.height = this.canvas.height;
    const from = pixels(left - 2 * REACH);
    this.draw(clearedContext(this.strip, from, right - from, this.height), axis, first);
    const context = this.canvas.getContext("2d"), { top } = this, height = this.height - top;
    const source = [left - from, top, width, height].map((v) => v * ratio);
    context.clearRect(left, top, width, height);
    context.drawImage(this.strip, ...source, left, top, width, height);
  }

  /** Draw the picture. Only the steps from `first` on need drawing; the others are there already. */
  draw(_context, _axis, _first) {}

  placeCursor() {
    const { store, cursor } = this, hovered = cursor.hover.step;
    const axis = store.numSteps > 0 ? this.axis() : null;
    const hoverAxis = hovered !== undefined && hovered !== cursor.step ? axis : null;
    place(this.cursorMark, axis, cursor.step, this.top, this.cursorBottom(), true);
    place(this.hoverMark, hoverAxis, hovered, this.top, this.cursorBottom(), false);
  }

  /** The table of the visible steps; `cells(step)` returns the cells after the number of the step. */
  stepTable(headings, cells) {
    const { store, cursor } = this, rows = [];
    const first = Math.max(0, Math.floor(cursor.range[0]));
    const last = Math.min(store.numSteps, Math.ceil(cursor.range[1]), first + TABLE_STEPS);
    for (let step = first; step < last; step++) rows.push({ step, cells: [store.label(step), ...cells(step)] });
    return {
      caption: `Steps ${store.label(first)} to ${store.label(last - 1)}`,
      headings: ["step", ...headings],
      rows,
      onclick: (row) => cursor.seek(row.step),
    };
  }
}

/** Put a mark on a step: a frame when steps are wide enough for one, a line when they are not. */
function place(mark, axis, step, top, bottom, mayFrame) {
  const x = axis ? axis.x(step) : 0, width = axis ? Math.max(1.5, axis.end(step) - x) : 0;
  const hidden = !axis || x + width < axis.x0 - 1 || x > axis.x1 + 1;
  if (mark.hidden !== hidden) mark.hidden = hidden;
  if (hidden) return;
  const frame = mayFrame && width >= 5;
  const [left, wide] = frame ? [x - 2, width + 3] : [x + width / 2 - 0.75, 1.5];
  const position = `transform:translate(${left.toFixed(2)}px,${top}px)`;
  const style = `${position};width:${wide.toFixed(2)}px;height:${bottom - top}px`;
  if (mark.placed === style) return;
  mark.placed = style;
  mark.style.cssText = style;
  mark.classList.toggle("wb-cursor-frame", frame);
}

// A panel on the shared step axis. Two things make it cheap to follow a running engine: while the axis stands still
// only the columns of the new steps are drawn, and the cursor is an element above the picture, so that moving it draws
// nothing at all.

import { h } from "./dom.js";
import { clearedContext } from "./drawing.js";
import { CanvasPanel } from "./panel.js";
import { MARGIN, StepAxis } from "./step_axis.js";

/** Pixels that the marks of a step may reach beyond its column. */
const REACH = 8;

export class StepPanel extends CanvasPanel {
  constructor(view, options) {
    super(view, options);
    this.cursorMark = h("div", { class: "wb-cursor", hidden: true });
    this.hoverMark = h("div", { class: "wb-cursor wb-cursor-hover", hidden: true });
    this.holder.append(this.hoverMark, this.cursorMark);
    this.drawnSteps = 0;
    this.top = 0; // what is above it does not belong to any step, such as a legend
  }

  needs(what) { return what !== "status"; }

  /** The overlay holds what depends on the cursor at the right of the axis. */
  overlayLeft() { return this.width - MARGIN.right; }

  /** Bottom of the cursor line. */
  cursorBottom() { return this.height; }

  render(stale) {
    if (!this.width) this.resized();
    if (!this.width) return;
    if ([...stale].some((what) => this.base(what))) this.drawBase(stale);
    this.placeCursor();
    if (this.showsOverlay()) this.drawOverlay(this.prepare(this.overlay, this.overlayLeft()), this.width, this.height);
  }

  drawBase(stale) {
    this.layout?.();
    const { store } = this, axis = new StepAxis(store, this.cursor, this.width);
    const picture = JSON.stringify([axis.from, axis.to, axis.byTime, axis.t1, this.width, this.height, this.theme.name, this.scale?.(axis)]);
    const grown = picture === this.picture && store.numSteps > this.drawnSteps && [...stale].every((what) => what === "grown" || !this.base(what));
    if (grown && this.drawnSteps > 0) this.drawNew(axis);
    else this.draw(this.prepare(this.canvas), axis, axis.first);
    this.picture = picture;
    this.drawnSteps = store.numSteps;
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.describe()}`);
  }

  /**
   * Draw the columns from the last drawn step on, to the pixel as a whole picture would have them: beside the picture
   * first, because a mark that is cut by a clipping edge is not drawn quite as a whole one.
   */
  drawNew(axis) {
    const ratio = globalThis.devicePixelRatio || 1, pixels = (x) => Math.floor(x * ratio) / ratio;
    const left = pixels(axis.x(this.drawnSteps - 1) - REACH), right = Math.min(this.width, pixels(axis.x1 + REACH) + 1), width = right - left;
    let first = this.drawnSteps - 1;
    while (first > axis.first && axis.end(first - 1) + REACH >= left) first--;
    this.strip ||= document.createElement("canvas");
    this.strip.width = Math.round((width + 2 * REACH) * ratio);
    this.strip.height = this.canvas.height;
    const from = pixels(left - 2 * REACH), strip = clearedContext(this.strip, from, right - from, this.height);
    this.draw(strip, axis, first);
    const context = this.canvas.getContext("2d"), height = this.height - this.top;
    context.clearRect(left, this.top, width, height);
    context.drawImage(this.strip, (left - from) * ratio, this.top * ratio, width * ratio, height * ratio, left, this.top, width, height);
  }

  /** Draw the picture, of the steps only those from `first` on: the others are there already. */
  draw(_context, _axis, _first) {}

  placeCursor() {
    const { store, cursor } = this, shown = store.numSteps > 0;
    const axis = shown ? new StepAxis(store, cursor, this.width) : null;
    place(this.cursorMark, axis, cursor.step, this.top, this.cursorBottom(), true);
    const hovered = cursor.hover.step;
    place(this.hoverMark, hovered !== undefined && hovered !== cursor.step ? axis : null, hovered, this.top, this.cursorBottom(), false);
  }
}

/** Put a mark on a step: a frame where steps are wide enough for one, a line where they are not. */
function place(mark, axis, step, top, bottom, mayFrame) {
  const x = axis ? axis.x(step) : 0, width = axis ? Math.max(1.5, axis.end(step) - x) : 0;
  const hidden = !axis || x + width < axis.x0 - 1 || x > axis.x1 + 1;
  if (mark.hidden !== hidden) mark.hidden = hidden;
  if (hidden) return;
  const frame = mayFrame && width >= 5;
  const [left, wide] = frame ? [x - 2, width + 3] : [x + width / 2 - 0.75, 1.5];
  const style = `transform:translate(${left.toFixed(2)}px,${top}px);width:${wide.toFixed(2)}px;height:${bottom - top}px`;
  if (mark.placed === style) return;
  mark.placed = style;
  mark.style.cssText = style;
  mark.classList.toggle("wb-cursor-frame", frame);
}

// The row of one request in the Gantt chart: its chunks, the steps in which it waits, and its events.

import { dashes, dot, draftCells, eventMark, hatch, SMALL, text, textWidth } from "./drawing.js";
import { waitsOf } from "./request.js";
import { upperBound } from "./sorted.js";
import { inkOn } from "./theme.js";

export const ROW = 16;

/** Draw the row of a request at `y`, beginning with step `from`. */
export function drawRow(context, { store, theme }, axis, request, y, from) {
  drawWaiting(context, store, theme, axis, request, y + ROW / 2 - 0.5);
  drawChunks(context, store, theme, axis, request, y, from);
  drawEvents(context, theme, axis, request, y + ROW / 2 - 0.5, from);
}

/** A thin line while a request is not scheduled: grey while it waits, dashed after a preemption. */
function drawWaiting(context, store, theme, axis, request, y) {
  for (const { state, begin, until } of waitsOf(store, request)) {
    const from = Math.max(begin, axis.first), to = Math.min(until, axis.last);
    if (to <= from) continue;
    const x = axis.x(from), width = (to < store.numSteps ? axis.x(to) : axis.end(to - 1)) - x;
    context.fillStyle = theme.colours.muted;
    if (state === "preempted") dashes(context, x, y - 0.5, width, theme.colours.muted, 3, 2);
    else context.fillRect(x, y - 0.5, width, 1);
  }
}

function drawChunks(context, store, theme, axis, request, y, from) {
  const { chunks, chunkSteps } = request, flags = store.column("chunk.flags");
  const isDecode = (i) => (flags[chunks[i]] & 3) === 0;
  const dense = axis.stepWidth < 5 && !axis.byTime;
  const end = upperBound(chunkSteps, axis.last - 1);
  for (let i = upperBound(chunkSteps, from - 1); i < end; i++) {
    if (!dense || !isDecode(i)) {
      drawCell(context, theme, axis, store.chunk(chunks[i]), chunkSteps[i], y);
      continue;
    }
    // Too narrow for single cells: one light bar per unbroken run of decodes.
    const first = chunkSteps[i];
    while (i + 1 < end && isDecode(i + 1) && chunkSteps[i + 1] === chunkSteps[i] + 1) i++;
    const x = axis.x(first);
    context.fillStyle = theme.decode(request.index);
    context.fillRect(x, y + 4, Math.max(1, axis.end(chunkSteps[i]) - x), ROW - 9);
  }
}

function drawCell(context, theme, axis, chunk, step, y) {
  const { colours } = theme, top = y + 2, height = ROW - 5, middle = y + ROW / 2 - 0.5;
  const x = axis.x(step), width = Math.max(1, axis.end(step) - x - (axis.stepWidth > 4 ? 1 : 0));
  const fill = context.fillStyle = theme.fill(chunk);
  if (chunk.decode && chunk.drafts && width > 4) {
    context.fillRect(x, top, width, height);
    draftCells(context, x, top + 1, width, height - 2, chunk, colours.outline);
    return;
  }
  if (chunk.decode) {
    context.fillRect(x, top + 2, width, height - 4);
    context.fillStyle = colours.outline;
    dot(context, x + width / 2, middle, Math.min(1.6, width / 3));
    return;
  }
  context.fillRect(x, top, width, height);
  if (chunk.recomputed) hatch(context, x, top, (width * chunk.recomputed) / chunk.n, height, colours.background, 4);
  const label = String(chunk.n);
  if (width < textWidth(context, label, SMALL) + 4) return;
  text(context, label, x + width / 2, middle + 0.5, inkOn(fill), SMALL, "center");
}

function drawEvents(context, theme, axis, request, y, from) {
  for (const { step, state } of request.changes) {
    if (step < from || step >= axis.last) continue;
    const x = axis.x(step);
    if (state === "preempted") eventMark(context, theme, "preempt", x + Math.min(6, axis.stepWidth / 2), y, 4);
    if (state === "finished") eventMark(context, theme, "finish", axis.end(step) + 4, y, 2.5);
    if (state === "aborted") eventMark(context, theme, "abort", x + 3, y, 3);
  }
}

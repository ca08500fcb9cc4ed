// Drawing on canvases: texts, hatching, dashes, and the marks of events and requests.

import { formatNumber } from "./dom.js";

const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const FONT = `11px ${SANS}`;
export const SMALL = `10px ${SANS}`;
export const BOLD = `600 11px ${SANS}`;
export const MONO = "10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

/** The context of a canvas that shows a panel from `left` on: empty, and in the panel's own coordinates. */
export function clearedContext(canvas, left, width, height) {
  const ratio = globalThis.devicePixelRatio || 1, context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, -left * ratio, 0);
  context.clearRect(left, 0, width, height);
  context.font = context.fontInUse = FONT;
  context.lineWidth = 1; // a picture drawn again has the lines of the first time
  context.textBaseline = "middle";
  return context;
}

/** At most `count` round tick values for a range. */
export function ticks(from, to, count, whole = false) {
  const raw = (to - from) / Math.max(1, count);
  if (!(raw > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(raw));
  let size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  if (whole) size = Math.max(1, Math.round(size));
  const result = [];
  for (let v = Math.ceil(from / size) * size; v <= to + size * 1e-9; v += size) result.push(Number(v.toPrecision(12)));
  return result;
}

// -- text --------------------------------------------------------------------------------------------------------

/** Set the font only when it changes: parsing it is expensive in a panel with hundreds of labels. */
function setFont(context, font) {
  if (context.fontInUse === font) return;
  context.font = context.fontInUse = font;
}

export function text(context, string, x, y, colour, font = FONT, align = "left") {
  setFont(context, font);
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(string, x, y);
}

/** Pixels between the labels of ticks. */
const TICK_GAP = 8;

/**
 * The label of a tick, which begins at it and ends on the picture; none if the one before it is in the way.
 *
 * @param room First pixel that the labels before it leave free.
 * @returns The first pixel that it leaves free; ``room`` if it is left out.
 */
export function tickLabel(context, string, x, y, colour, width, room = -Infinity) {
  const wide = textWidth(context, string, SMALL), left = Math.min(x, width - wide - 1);
  if (left < room) return room;
  text(context, string, left, y, colour, SMALL);
  return left + wide + TICK_GAP;
}

/** A text that stays readable on a picture: it has an outline in the colour of the background. */
export function outlinedText(context, string, x, y, colour, background, font = FONT) {
  setFont(context, font);
  context.textAlign = "left";
  context.strokeStyle = background;
  context.lineWidth = 3;
  context.strokeText(string, x, y);
  text(context, string, x, y, colour, font);
}

const widths = new Map();

/** Width of a text in pixels, remembered; every digit counts as a 0, because counters never end. */
export function textWidth(context, string, font) {
  const sample = string.replace(/\d/g, "0"), key = font + sample;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size > 5000) widths.clear();
    setFont(context, font);
    widths.set(key, width = context.measureText(sample).width);
  }
  return width;
}

/** As many parts of a text, each after the separator, as fit into a width; the first in any case. */
export function fitting(context, parts, separator, width, font = FONT) {
  return parts.reduce((found, part) => {
    const longer = found + separator + part;
    return textWidth(context, longer, font) <= width ? longer : found;
  });
}

/** The end of a label that fits into a width: names of requests mostly differ there. */
export function fittingEnd(context, label, width, font = MONO) {
  let shown = label;
  for (let from = 1; textWidth(context, shown, font) > width && from < label.length; from++) {
    shown = `…${label.replace(/^…/, "").slice(from)}`;
  }
  return shown;
}

/** The id of a request, right-aligned, with the square of its hue before it when it is in focus. */
export function requestLabel(context, theme, request, x, y) {
  const hue = theme.hue(request.index), id = fittingEnd(context, request.label, x - (hue ? 14 : 1));
  text(context, id, x, y, theme.colours.text, MONO, "right");
  if (!hue) return;
  context.fillStyle = hue;
  context.fillRect(x - textWidth(context, id, MONO) - 12, y - 3.5, 7, 7);
}

/** Label whole numbers under an axis that begins with 0; `x` turns a number into a pixel. */
/** Whole numbers from 0 on for the labels of an axis of some pixels: as many as fit, `most` intervals or fewer. */
export function ticksIn(context, to, pixels, most) {
  const wide = textWidth(context, formatNumber(to), SMALL) + TICK_GAP;
  return ticks(0, to, Math.max(1, Math.min(most, Math.floor(pixels / wide))), true);
}

export function tickLabels(context, values, x, y, colour) {
  for (const value of values) text(context, formatNumber(value), x(value), y, colour, SMALL, value ? "center" : "left");
}

// -- fills -------------------------------------------------------------------------------------------------------

const patterns = new Map();

/** A repeated tile of width x height pixels, made once per key; `draw` draws it in pixels of the screen. */
function pattern(context, key, width, height, draw) {
  const ratio = globalThis.devicePixelRatio || 1, name = `${key} ${width} ${height} ${ratio}`;
  if (!patterns.has(name)) {
    if (patterns.size > 200) patterns.clear();
    const tile = document.createElement("canvas");
    tile.width = Math.round(width * ratio);
    tile.height = Math.round(height * ratio);
    draw(tile.getContext("2d"), tile, ratio);
    const made = context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(width / tile.width, height / tile.height));
    patterns.set(name, made);
  }
  return patterns.get(name);
}

/** Fill a rectangle with diagonal lines: recomputed tokens, unused budget, evictable blocks. */
export function hatch(context, x, y, width, height, colour, spacing = 5) {
  if (width <= 0 || height <= 0) return;
  context.fillStyle = pattern(context, colour, spacing, spacing, (draw, { width: size }, ratio) => {
    draw.strokeStyle = colour;
    draw.lineWidth = ratio;
    // Three lines, so that the corners of neighbouring tiles join.
    for (const shift of [-size, 0, size]) {
      draw.moveTo(shift - 1, size + 1);
      draw.lineTo(shift + size + 1, -1);
    }
    draw.stroke();
  });
  context.fillRect(x, y, width, height);
}

/** A horizontal dashed line, one pixel high. It is a pattern because stroking hundreds of dashes is expensive. */
export function dashes(context, x, y, width, colour, on, off) {
  if (width <= 0) return;
  context.fillStyle = pattern(context, `dashes ${colour} ${on}`, on + off, 1, (draw, tile, ratio) => {
    draw.fillStyle = colour;
    draw.fillRect(0, 0, Math.round(on * ratio), tile.height);
  });
  context.fillRect(x, y, width, 1);
}

// -- shapes ------------------------------------------------------------------------------------------------------

/** Begin a closed path through corners given as [x, y] pairs. */
export function polygon(context, corners) {
  context.beginPath();
  for (const [x, y] of corners) context.lineTo(x, y);
  context.closePath();
}

export function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}

/** The mark of an event, centred on a point. */
export function eventMark(context, theme, kind, x, y, size = 4) {
  const { shape, colour } = theme.event(kind);
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  if (shape === "up") polygon(context, [[x, y - size], [x + size, y + size], [x - size, y + size]]);
  if (shape === "down") polygon(context, [[x, y + size], [x + size, y - size], [x - size, y - size]]);
  if (shape === "half") context.arc(x, y, size, Math.PI / 2, -Math.PI / 2);
  if (shape === "square") context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
  if (shape === "bar") context.rect(x - 0.75, y - size, 1.5, size * 2);
  if (shape === "cross") {
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
    return context.stroke();
  }
  context.closePath();
  context.fill();
}

/**
 * The rows of a chunk that verifies drafts, side by side: the known ones and accepted drafts filled, rejected drafts
 * outlined and, in cells that are wide enough, crossed out.
 */
export function draftCells(context, x, y, width, height, chunk, colour) {
  const cell = width / chunk.n, gap = cell > 3 ? 1 : 0, kept = chunk.n - chunk.drafts + chunk.accepted;
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash([]);
  for (let row = 0; row < kept; row++) context.fillRect(x + row * cell, y, Math.max(0.5, cell - gap), height);
  if (cell <= 3) {
    if (kept < chunk.n) context.strokeRect(x + kept * cell + 0.5, y + 0.5, (chunk.n - kept) * cell - 1, height - 1);
    return;
  }
  context.beginPath();
  for (let row = kept; row < chunk.n; row++) {
    const left = x + row * cell + 0.5,
      right = x + (row + 1) * cell - gap - 0.5,
      top = y + 0.5,
      bottom = y + height - 0.5;
    context.rect(left, top, right - left, bottom - top);
    context.moveTo(left, top);
    context.lineTo(right, bottom);
    context.moveTo(right, top);
    context.lineTo(left, bottom);
  }
  context.stroke();
}

/** Two zigzag lines through a shape that is drawn shorter than its share of the scale. */
export function breakMark(context, x, y, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  for (const dx of [0, 4]) {
    context.beginPath();
    context.moveTo(x + dx + 3, y);
    context.lineTo(x + dx - 1, y + height * 0.4);
    context.lineTo(x + dx + 3, y + height * 0.6);
    context.lineTo(x + dx - 1, y + height);
    context.stroke();
  }
}

// What panels draw with: texts, hatchings, dashes, the marks of events and of requests.

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const SMALL = '10px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const BOLD = '600 11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const MONO = '10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace';

/** The context of a canvas that shows a panel from `left` on: empty, and in the panel's own coordinates. */
export function clearedContext(canvas, left, width, height) {
  const ratio = globalThis.devicePixelRatio || 1, context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, -left * ratio, 0);
  context.clearRect(left, 0, width, height);
  context.font = context.fontInUse = FONT;
  context.textBaseline = "middle";
  return context;
}

/** Round tick values for a range, at most `count` of them. */
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

const patterns = new Map();

/** Fill a rectangle with diagonal lines: recomputed tokens, unused budget, evictable blocks. */
export function hatch(context, x, y, width, height, colour, spacing = 5) {
  if (width <= 0 || height <= 0) return;
  const ratio = globalThis.devicePixelRatio || 1, key = `${colour} ${spacing} ${ratio}`;
  if (!patterns.has(key)) {
    if (patterns.size > 200) patterns.clear();
    const size = Math.round(spacing * ratio), tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const draw = tile.getContext("2d");
    draw.strokeStyle = colour;
    draw.lineWidth = ratio;
    // Three lines, so that the corners of neighbouring tiles join.
    for (const shift of [-size, 0, size]) {
      draw.moveTo(shift - 1, size + 1);
      draw.lineTo(shift + size + 1, -1);
    }
    draw.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(spacing / size));
    patterns.set(key, pattern);
  }
  context.fillStyle = patterns.get(key);
  context.fillRect(x, y, width, height);
}

/** A horizontal dashed line, one pixel high. A pattern, because stroking hundreds of dashes is dear. */
export function dashes(context, x, y, width, colour, on, off) {
  if (width <= 0) return;
  const ratio = globalThis.devicePixelRatio || 1, key = `dashes ${colour} ${on} ${off} ${ratio}`;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = Math.round((on + off) * ratio);
    tile.height = 1;
    const draw = tile.getContext("2d");
    draw.fillStyle = colour;
    draw.fillRect(0, 0, Math.round(on * ratio), 1);
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale((on + off) / tile.width, 1));
    patterns.set(key, pattern);
  }
  context.fillStyle = patterns.get(key);
  context.fillRect(x, y, width, 1);
}

/** The mark of an event, centred on a point. */
export function eventMark(context, theme, kind, x, y, size = 4) {
  const { shape, colour } = theme.event(kind);
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  if (shape === "up") { context.moveTo(x, y - size); context.lineTo(x + size, y + size); context.lineTo(x - size, y + size); }
  if (shape === "down") { context.moveTo(x, y + size); context.lineTo(x + size, y - size); context.lineTo(x - size, y - size); }
  if (shape === "half") context.arc(x, y, size, Math.PI / 2, -Math.PI / 2);
  if (shape === "square") context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
  if (shape === "bar") context.rect(x - 0.75, y - size, 1.5, size * 2);
  if (shape === "cross") {
    context.moveTo(x - size, y - size); context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size); context.lineTo(x - size, y + size);
    return context.stroke();
  }
  context.closePath();
  context.fill();
}

/** Set the font only when it changes: parsing it is dear where a panel writes hundreds of labels. */
function setFont(context, font) {
  if (context.fontInUse === font) return;
  context.font = context.fontInUse = font;
}

export function text(context, string, x, y, colour, { align = "left", font = FONT } = {}) {
  setFont(context, font);
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(string, x, y);
}

const widths = new Map();

/** Width of a text in pixels, remembered; every digit counts as a 0, because counters never end. */
export function textWidth(context, string, font) {
  const sample = string.replace(/\d/g, "0"), key = font + sample;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size > 5000) widths.clear();
    setFont(context, font);
    widths.set(key, (width = context.measureText(sample).width));
  }
  return width;
}

/** A request id, right-aligned, with the square of its hue before it when it is in focus. */
export function requestLabel(context, id, x, y, colour, hue) {
  text(context, id, x, y, colour, { align: "right", font: MONO });
  if (!hue) return;
  context.fillStyle = hue;
  context.fillRect(x - textWidth(context, id, MONO) - 12, y - 3.5, 7, 7);
}

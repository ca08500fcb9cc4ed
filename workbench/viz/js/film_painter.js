// The picture of a scene of a step, on a canvas of a fixed size; its marks appear one after the other.

import { formatNumber, plain } from "./dom.js";
import { inkOn } from "./theme.js";

/** Size of the canvas in pixels. */
export const WIDTH = 960;
export const HEIGHT = 540;

const MARGIN = 40, LEFT = 170, TOP = 150, FOOT = HEIGHT - 22, MOST_ROWS = 9, TALLEST_ROW = 44;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

const PAINTERS = { schedule, blocks, mask, attention, sample };

/**
 * Paint a scene.
 * @param context The context of the canvas.
 * @param view Its requests name the marks, its theme colours them.
 * @param scene A scene of film_scenes.js.
 * @param {string} title
 * @param {number} share Part of the marks that has appeared, from 0 to 1.
 * @param {boolean} tells Whether the sentence of the scene is in the picture; it stands beside it otherwise.
 */
export function paintScene(context, view, scene, title, share, tells) {
  const { colours } = view.theme, pen = penFor(context, view);
  context.fillStyle = colours.background;
  context.fillRect(0, 0, WIDTH, HEIGHT);
  context.textBaseline = "middle";
  pen.text(title, MARGIN, 36, { size: 24, weight: 600 });
  if (tells) pen.wrapped(scene.sentence, MARGIN, 72, WIDTH - 2 * MARGIN);
  PAINTERS[scene.name](pen, scene, share);
}

/** Texts, boxes and rows on a canvas, in the colours of a view. */
function penFor(context, { store, theme }) {
  const { colours } = theme;
  const text = (words, x, y, { size = 15, weight = 400, colour = "text", align = "left" } = {}) => {
    context.font = `${weight} ${size}px ${FONT}`;
    context.textAlign = align;
    context.fillStyle = colours[colour] ?? colour;
    context.fillText(words, x, y);
  };
  /** A sentence on up to three lines. */
  const wrapped = (sentence, x, y, width) => {
    const lines = [""];
    context.font = `400 16px ${FONT}`;
    for (const word of plain(sentence, 400).split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    if (lines.length > 3) lines.splice(2, lines.length, `${lines[2]} …`);
    lines.forEach((line, i) => text(line, x, y + i * 22, { size: 16, colour: "muted" }));
  };
  const box = (x, y, width, height, fill, stroke = null) => {
    context.fillStyle = fill;
    context.fillRect(x, y, width, height);
    if (!stroke) return;
    context.strokeStyle = stroke;
    context.lineWidth = 2;
    context.strokeRect(x, y, width, height);
  };
  const label = (request, y) => text(store.requests[request].label, LEFT - 10, y, { align: "right" });
  /** Rows with their labels, as many as fit, and the number of the others. */
  const rows = (all, draw) => {
    const shown = all.slice(0, MOST_ROWS), row = Math.min(TALLEST_ROW, (FOOT - TOP - 20) / (shown.length + 1));
    shown.forEach((each, i) => {
      const middle = TOP + (i + 0.5) * row;
      label(each.request, middle);
      draw(each, middle, row * 0.7);
    });
    const more = all.length - shown.length;
    if (more) text(`and ${formatNumber(more)} more`, LEFT, TOP + (shown.length + 0.5) * row, { colour: "muted" });
  };
  const hue = (request, isDecode = false) => isDecode ? theme.decode(request) : theme.prefill(request);
  const foot = (words) => text(words, LEFT, FOOT, { colour: "muted" });
  return { box, colours, foot, hue, label, nameOf: (request) => store.requests[request].label, rows, text, wrapped };
}

function schedule(pen, { budget, bars, waits }, share) {
  const { box, colours, hue, nameOf, text } = pen, used = bars.at(-1)?.to ?? 0, shown = share * used;
  const scale = (WIDTH - LEFT - MARGIN) / Math.max(1, budget, used);
  text("token budget", LEFT - 10, TOP + 25, { align: "right" });
  box(LEFT, TOP, budget * scale, 50, colours.surface, colours.hairline);
  for (const { request, from, to, decode } of bars.filter((bar) => bar.from < shown)) {
    const x = LEFT + from * scale, width = (Math.min(to, shown) - from) * scale, fill = hue(request, decode);
    box(x, TOP, width, 50, fill, colours.background);
    const words = `${nameOf(request)}: ${formatNumber(to - from)}`;
    if (width > 9 * words.length) text(words, x + width / 2, TOP + 25, { align: "center", colour: inkOn(fill) });
  }
  text(`${formatNumber(used)} of ${formatNumber(budget)} tokens`, LEFT, TOP + 74, { colour: "muted" });
  if (!waits.length || share < 1) return;
  text("left out", LEFT - 10, TOP + 120, { align: "right" });
  waits.slice(0, 6).forEach(({ request, why }, i) => {
    text(plain([nameOf(request), why].filter(Boolean).join(": "), 90), LEFT, TOP + 120 + i * 26);
  });
  if (waits.length > 6) text(`and ${formatNumber(waits.length - 6)} more`, LEFT, TOP + 276, { colour: "muted" });
}

function blocks(pen, { rows }, share) {
  const { box, colours, hue, text } = pen, longest = Math.max(1, ...rows.map(({ places }) => places.length));
  const cell = Math.min(44, (WIDTH - LEFT - MARGIN) / longest);
  pen.rows(rows, ({ request, places }, y, height) => {
    places.forEach(({ block, fresh, found }, logical) => {
      if (!block || (fresh && logical + 1 > share * places.length)) return;
      const fill = fresh && !found ? hue(request) : colours.kv, x = LEFT + logical * cell;
      box(x, y - height / 2, Math.max(1, cell - 3), height, fill, found ? hue(request) : null);
      if (cell >= 26) text(String(block), x + (cell - 3) / 2, y, { size: 12, align: "center", colour: inkOn(fill) });
    });
  });
  pen.foot("full colour: taken now; outlined: found in the prefix cache; pale: held before");
}

function mask(pen, { rows, columns, bands, window }, share) {
  const { box, colours, hue, label } = pen, width = WIDTH - LEFT - MARGIN;
  const dx = width / Math.max(1, columns), dy = Math.min(18, (FOOT - TOP - 20) / Math.max(1, rows));
  box(LEFT, TOP, width, rows * dy, colours.surface, colours.hairline);
  let left = 0;
  for (const { request, q0, q1, start, end } of bands) {
    for (let q = q0; q < Math.min(q1, share * rows); q++) {
      const position = start + q - q0, from = window ? Math.max(0, position - window + 1) : 0;
      // Rows that are thinner than a pixel overlap, so that no stripes appear between them.
      const height = dy > 4 ? dy - 1 : dy + 0.5;
      box(LEFT + (left + from) * dx, TOP + q * dy, (position + 1 - from) * dx, height, hue(request));
    }
    if ((q1 - q0) * dy >= 14) label(request, TOP + (q0 + q1) / 2 * dy);
    left += end;
  }
  pen.foot("query rows downwards, KV positions of all requests to the right");
}

function attention(pen, { items, longest }, share) {
  const { box, colours, hue, text } = pen, scale = (WIDTH - LEFT - MARGIN - 90) / Math.max(1, longest);
  pen.rows(items, ({ request, rows, from, to }, y, height) => {
    const x = LEFT + from * scale, width = (to - from) * scale;
    box(x, y - height / 2, width, height, colours.kv);
    box(x, y - height / 2, width * share, height, hue(request));
    const words = `${formatNumber(rows)} ${rows === 1 ? "row" : "rows"}`;
    text(words, x + width + 8, y, { size: 13, colour: "muted" });
  });
  pen.foot("an item reads keys and values from left to right, tile by tile");
}

function sample(pen, { rows }, share) {
  const { box, hue, text } = pen;
  pen.rows(rows, ({ request, tokens }, y, height) => {
    const words = tokens.length ? plain(tokens.join("").trimStart(), 60) : "no token yet";
    const style = tokens.length ? { weight: 600, colour: "text" } : { weight: 400, colour: "muted" };
    text(words.slice(0, Math.ceil(words.length * share)), LEFT + 14, y, { size: 18, ...style });
    box(LEFT, y - height / 2, 5, height, hue(request));
  });
}

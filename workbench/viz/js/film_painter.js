// The picture of a scene of a step, on a canvas; its marks appear one after the other.

import { formatNumber, plain } from "./dom.js";
import { firstSeen } from "./geometry.js";
import { inkOn } from "./theme.js";

/**
 * The frames of a scene, in pixels: that of a film, and a small one that stays readable as wide as a phone.
 * `left` and `top` are the corner of the marks, `tall` the tallest row, `line` the distance of lines of text, `largest`
 * its largest size, and `scale` that of the canvas.
 */
export const FILM_FRAME = {
  width: 960,
  height: 540,
  margin: 40,
  left: 170,
  top: 150,
  tall: 44,
  bar: 50,
  line: 26,
  largest: 24,
  scale: 1,
};
export const PHONE_FRAME = {
  width: 400,
  height: 330,
  margin: 10,
  left: 90,
  top: 40,
  tall: 30,
  bar: 34,
  line: 20,
  largest: 13,
  scale: 2,
};

/** Most rows of a scene, and least width of a column of names, in pixels. */
const MOST_ROWS = 10, COLUMN = 140;
/** Least width of a piece of the budget in pixels, and the width from which pieces have an outline. */
const LEAST_WIDTH = 2, OUTLINED = 6;
/** Tokens that fill less than this part of the budget are drawn once more, as wide as the budget. */
const ENLARGED = 4;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

const PAINTERS = { schedule, blocks, mask, attention, sample };

/**
 * Paint a scene.
 * @param context The context of the canvas.
 * @param frame One of the frames above; it fills the canvas.
 * @param view Its requests name the marks, its theme colours them.
 * @param scene A scene of film_scenes.js.
 * @param {string} title
 * @param {number} share Part of the marks that has appeared, from 0 to 1.
 * @param {boolean} tells Whether the sentence of the scene is in the picture; it stands beside it otherwise.
 */
export function paintScene(context, frame, view, scene, title, share, tells) {
  const { width, height, margin, scale } = frame, { colours } = view.theme, pen = penFor(context, frame, view);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.fillStyle = colours.background;
  context.fillRect(0, 0, width, height);
  context.textBaseline = "middle";
  pen.text(title, margin, frame === FILM_FRAME ? 36 : 20, { size: 24, weight: 600 });
  if (tells) pen.wrapped(scene.sentence, margin, 72, width - 2 * margin, { size: 16, line: 22 });
  PAINTERS[scene.name](pen, scene, share);
}

/** The first of some items, all if they fit, and the number of the others, which takes a place, too. */
function firstOf(items, most) {
  const shown = items.length > most ? items.slice(0, most - 1) : items;
  return { shown, more: items.length - shown.length };
}

function moreWords(number) {
  return `and ${formatNumber(number)} more`;
}

/** Texts, boxes, rows and lists on a canvas, in the colours of a view. */
function penFor(context, frame, { store, theme }) {
  const { colours } = theme, { left, top, largest, line } = frame, width = frame.width - left - frame.margin;
  const isFilm = frame === FILM_FRAME, foot = frame.height - (isFilm ? 22 : 32);
  const font = (size, weight) => `${weight} ${Math.min(size, largest)}px ${FONT}`;
  /** A text, cut where it would leave the picture or the width that is given. */
  const text = (words, x, y, { size = 15, weight = 400, colour = "text", align = "left", most = Infinity } = {}) => {
    context.font = font(size, weight);
    context.textAlign = align;
    context.fillStyle = colours[colour] ?? colour;
    context.fillText(cut(words, align === "left" ? Math.min(most, frame.width - x) : most), x, y);
  };
  const cut = (words, most) => {
    let shown = words;
    for (let end = words.length - 1; end > 0 && context.measureText(shown).width > most; end--) {
      shown = `${words.slice(0, end).trimEnd()}…`;
    }
    return shown;
  };
  /** A sentence on up to three lines. */
  const wrapped = (sentence, x, y, width, { size = 15, line: distance = line } = {}) => {
    const lines = [""];
    context.font = font(size, 400);
    for (const word of plain(sentence, 400).split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    if (lines.length > 3) lines.splice(2, lines.length, `${lines[2]} …`);
    lines.forEach((words, i) => text(words, x, y + i * distance, { size, colour: "muted" }));
  };
  const box = (x, y, width, height, fill, stroke = null) => {
    context.fillStyle = fill;
    context.fillRect(x, y, width, height);
    if (!stroke) return;
    context.strokeStyle = stroke;
    context.lineWidth = 2;
    context.strokeRect(x, y, width, height);
  };
  const label = (request, y) => text(store.requests[request].label, left - 10, y, { align: "right" });
  /** Rows with their labels, as many as fit, and the number of the others. */
  const rows = (all, draw) => {
    const { shown, more } = firstOf(all, MOST_ROWS), lines = shown.length + Number(more > 0);
    const row = Math.min(frame.tall, (foot - top - 20) / lines);
    shown.forEach((each, i) => {
      const middle = top + (i + 0.5) * row;
      label(each.request, middle);
      draw(each, middle, row * 0.7);
    });
    if (more) text(moreWords(more), left, top + (shown.length + 0.5) * row, { colour: "muted" });
  };
  /** A list from `y` on, with a heading beside it, on as many lines as it may take: how many it takes. */
  const list = (heading, items, y, { lines, columns = 1 }, wordsOf, hueOf = null) => {
    if (!items.length) return 0;
    const { shown, more } = firstOf(items, lines * columns), wide = width / columns;
    const write = (words, i, style) => {
      text(words, left + (i % columns) * wide + (hueOf ? 18 : 0), y + Math.floor(i / columns) * line, style);
    };
    text(heading, left - 10, y, { align: "right" });
    shown.forEach((item, i) => {
      write(wordsOf(item), i, { most: wide - 26 });
      if (hueOf) box(left + (i % columns) * wide, y + Math.floor(i / columns) * line - 6, 12, 12, hueOf(item));
    });
    if (more) write(moreWords(more), shown.length, { colour: "muted" });
    return Math.ceil((shown.length + Number(more > 0)) / columns);
  };
  const hue = (request, isDecode = false) => isDecode ? theme.decode(request) : theme.prefill(request);
  /** The words below the marks: on one line beside the labels, or on two lines as wide as a phone. */
  const tell = (words) => {
    if (isFilm) text(words, left, foot, { colour: "muted" });
    else wrapped(words, frame.margin, foot, frame.width - 2 * frame.margin);
  };
  const nameOf = (request) => store.requests[request].label;
  return { ...frame, width, foot, isFilm, box, colours, hue, label, list, nameOf, rows, tell, text, wrapped };
}

function schedule(pen, { budget, bars, waits }, share) {
  const { bar, box, colours, height, isFilm, left, line, list, nameOf, text, top, width } = pen;
  const used = bars.at(-1)?.to ?? 0, scale = width / Math.max(1, budget, used);
  text(isFilm ? "token budget" : "budget", left - 10, top + bar / 2, { align: "right" });
  box(left, top, budget * scale, bar, colours.surface, colours.hairline);
  let nameless = pieces(pen, bars, top, scale, share * used);
  text(`${formatNumber(used)} of ${formatNumber(budget)} tokens`, left, top + bar + line - 2, { colour: "muted" });
  let below = top + bar + 3 * line - 8;
  if (used && used * scale < width / ENLARGED) {
    text("enlarged", left - 10, below + bar / 2 - line, { align: "right" });
    nameless = pieces(pen, bars, below - line, width / used, share * used);
    below += bar + line;
  }
  if (share < 1) return;
  // Both lists fit below the bars; each has half of the lines, and those that the other leaves.
  const lines = Math.floor((height - below) / line), columns = Math.floor(width / COLUMN);
  const forNames = lines - Math.min(waits.length, Math.floor(lines / 2));
  const words = ({ request, from, to }) => `${nameOf(request)}: ${formatNumber(to - from)}`;
  const colour = ({ request, decode }) => pen.hue(request, decode);
  const taken = list("too narrow", nameless, below, { lines: forNames, columns }, words, colour);
  const wordsOf = ({ request, why }) => plain([nameOf(request), why].filter(Boolean).join(": "), 90);
  list("left out", waits, below + taken * line, { lines: lines - taken }, wordsOf);
}

/** The tokens of a step side by side, those before `shown`, each with as many of its words as fit: those without. */
function pieces({ bar, box, colours, hue, left, nameOf, text }, bars, y, scale, shown) {
  const nameless = [];
  let end = left;
  for (const piece of bars.filter((each) => each.from < shown)) {
    const { request, from, to, decode } = piece;
    const x = Math.max(end, left + from * scale), fill = hue(request, decode);
    const wide = Math.max(LEAST_WIDTH, (Math.min(to, shown) - from) * scale);
    box(x, y, wide, bar, fill, wide > OUTLINED ? colours.background : null);
    const name = nameOf(request), words = [`${name}: ${formatNumber(to - from)}`, name];
    const fitting = words.find((each) => wide > 9 * each.length);
    if (fitting) text(fitting, x + wide / 2, y + bar / 2, { align: "center", colour: inkOn(fill) });
    else nameless.push(piece);
    end = x + wide;
  }
  return nameless;
}

function blocks(pen, { rows }, share) {
  const { box, colours, hue, left, text, width } = pen;
  const longest = Math.max(1, ...rows.map(({ places }) => places.length)), cell = Math.min(44, width / longest);
  pen.rows(rows, ({ request, places }, y, height) => {
    places.forEach(({ block, fresh, found }, logical) => {
      if (!block || (fresh && logical + 1 > share * places.length)) return;
      const fill = fresh && !found ? hue(request) : colours.kv, x = left + logical * cell;
      box(x, y - height / 2, Math.max(1, cell - 3), height, fill, found ? hue(request) : null);
      if (cell >= 26) text(String(block), x + (cell - 3) / 2, y, { size: 12, align: "center", colour: inkOn(fill) });
    });
  });
  pen.tell("full colour: taken now; outlined: found in the prefix cache; pale: held before");
}

function mask(pen, { rows, columns, bands, window }, share) {
  const { box, colours, foot, hue, label, left: edge, top, width } = pen;
  const dx = width / Math.max(1, columns), dy = Math.min(18, (foot - top - 20) / Math.max(1, rows));
  box(edge, top, width, rows * dy, colours.surface, colours.hairline);
  let left = 0;
  for (const { request, q0, q1, start, end } of bands) {
    for (let q = q0; q < Math.min(q1, share * rows); q++) {
      const position = start + q - q0, from = firstSeen(position, window);
      // Rows that are thinner than a pixel overlap, so that no stripes appear between them.
      const height = dy > 4 ? dy - 1 : dy + 0.5;
      box(edge + (left + from) * dx, top + q * dy, (position + 1 - from) * dx, height, hue(request));
    }
    if ((q1 - q0) * dy >= 14) label(request, top + (q0 + q1) / 2 * dy);
    left += end;
  }
  pen.tell("query rows downwards, KV positions of all requests to the right");
}

function attention(pen, { items, longest }, share) {
  const { box, colours, hue, isFilm, left, text, width: room } = pen;
  const scale = (room - (isFilm ? 90 : 60)) / Math.max(1, longest);
  pen.rows(items, ({ request, rows, from, to }, y, height) => {
    const x = left + from * scale, width = (to - from) * scale;
    box(x, y - height / 2, width, height, colours.kv);
    box(x, y - height / 2, width * share, height, hue(request));
    const words = `${formatNumber(rows)} ${rows === 1 ? "row" : "rows"}`;
    text(words, x + width + 8, y, { size: 13, colour: "muted" });
  });
  pen.tell("an item reads keys and values from left to right, tile by tile");
}

function sample(pen, { rows }, share) {
  const { box, hue, left, text } = pen;
  pen.rows(rows, ({ request, tokens }, y, height) => {
    const words = tokens.length ? plain(tokens.join("").trimStart(), 60) : "no token yet";
    const style = tokens.length ? { weight: 600, colour: "text" } : { weight: 400, colour: "muted" };
    text(words.slice(0, Math.ceil(words.length * share)), left + 14, y, { size: 18, ...style });
    box(left, y - height / 2, 5, height, hue(request));
  });
}

// Two runs of one request, token by token: how long each token took, a above the line and b below it, and where the
// two texts part.

import { formatNumber, formatSeconds, plain } from "./dom.js";
import { SMALL, text, ticks } from "./drawing.js";
import { MARGIN } from "./step_axis.js";

/** Index of the first token in which two lists differ, or in which one of them has ended; -1 when they are the same. */
export function firstDifference(a, b) {
  const shorter = Math.min(a.length, b.length);
  for (let i = 0; i < shorter; i++) if (a[i].id !== b[i].id) return i;
  return a.length === b.length ? -1 : shorter;
}

export class TokenLanes {
  /** @param pairs [[request of a, request of b], ...] @param stores the store of each run */
  constructor(pairs, stores) {
    Object.assign(this, { pairs, stores });
    this.most = Math.max(8, ...pairs.flat().map((request) => request.tokens.length));
    // The time to first token is another matter than the time between tokens: it is cut off where it is longer.
    const later = pairs.flatMap((pair) => pair.flatMap((request, which) => request.tokens.slice(1).map((token) => this.latency(token, which))));
    this.longest = later.reduce((most, value) => (value > most ? value : most), 0) || 1;
    this.differences = pairs.map(([a, b]) => firstDifference(a.tokens, b.tokens));
  }

  /** Seconds (steps in a run without times) since the token before, or since arrival. */
  latency(token, which) {
    return this.stores[which].columns.get("chunk.latency").data[token.chunk];
  }

  x(index, width) {
    return MARGIN.left + (index / this.most) * (width - 16 - MARGIN.left);
  }

  at(x, width) {
    return Math.floor(((x - MARGIN.left) / (width - 16 - MARGIN.left)) * this.most);
  }

  drawAxis(context, width, y, colours) {
    for (const tick of ticks(0, this.most, 10, true)) text(context, formatNumber(tick), this.x(tick, width), y, colours.muted, { font: SMALL });
    text(context, "token", MARGIN.left - 8, y, colours.muted, { align: "right", font: SMALL });
  }

  /** One request: bars up for a and down for b from `middle`, grey from the first difference on. */
  drawLane(context, row, width, middle, half, theme) {
    const { colours } = theme, index = this.pairs[row][0].index, difference = this.differences[row];
    this.pairs[row].forEach((request, which) => {
      request.tokens.forEach((token, i) => {
        const x = this.x(i, width), w = Math.max(0.8, this.x(i + 1, width) - x - 0.8);
        const high = Math.max(1.5, Math.min(1, this.latency(token, which) / this.longest) * half);
        context.fillStyle = difference >= 0 && i >= difference ? colours.kv : which ? theme.decode(index) : theme.prefill(index);
        context.fillRect(x, which ? middle + 0.5 : middle - 0.5 - high, w, high);
      });
    });
    if (difference >= 0) markDifference(context, this.x(difference, width), middle, half, colours.bad);
  }

  /** What a token is in both runs, in words, and the step of the first run that made it. */
  describe(row, i, write) {
    const [a, b] = this.pairs[row], tokens = [a.tokens[i], b.tokens[i]], difference = this.differences[row];
    if (!tokens[0] && !tokens[1]) return null;
    const words = tokens.map((token, which) => {
      const run = which ? "b" : "a";
      if (!token) return `${run}: has ended`;
      return `${run}: ${plain(JSON.stringify(token.text || ""), 40)} (id ${token.id}) in step ${this.stores[which].label(token.step)}, after ${write(this.latency(token, which))}`;
    });
    const verdict = difference < 0 || i < difference ? "the same token" : i === difference ? "the first difference" : `after the first difference, at token ${difference}`;
    return { lines: [`${plain(a.id)}, token ${i}: ${verdict}`, ...words], step: tokens[0]?.step };
  }
}

/** The mark of the first differing token: a line through both runs with a cross on it. */
export function markDifference(context, x, middle, half, colour) {
  context.fillStyle = colour;
  context.fillRect(x - 1, middle - half, 1.5, 2 * half);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [dx, dy] of [[-3, -3], [-3, 3]]) {
    context.moveTo(x + dx, middle + dy);
    context.lineTo(x - dx, middle - dy);
  }
  context.stroke();
}

export const writeLatency = (timed) => (value) => (timed ? formatSeconds(value) : `${formatNumber(value)} steps`);

// Two runs of one request, token by token: the latency of each token, a above the line and b below it, and the first
// difference.

import { counted, formatNumber, formatSeconds, plain } from "./dom.js";
import { SMALL, text, ticks } from "./drawing.js";
import { nameOf } from "./request.js";

/** Margins of the lanes. */
export const LEFT = 84;
export const RIGHT = 16;

/** Number of tokens of a request before the steps that are here. */
const before = (request) => request.numBefore ?? 0;

/** Token `i` of a request's whole output; undefined for one that is not here. */
export const tokenAt = (request, i) => request.tokens[i - before(request)];

export class TokenLanes {
  /**
   * @param panel The comparison, with its `rows`, the two requests of each lane, and the `stores` of the two runs.
   * @param inSeconds Whether latencies are times; else they are steps, because one of the runs has no clock.
   */
  constructor(panel, inSeconds) {
    const pairs = this.pairs = panel.rows;
    this.stores = panel.stores;
    this.hasTokens = panel.hasTokens;
    this.inSeconds = inSeconds;
    this.differences = pairs.map(([{ id }]) => panel.differenceOf(id));
    this.first = Math.min(...pairs.flat().map(before)); // the number of the first token that is drawn
    this.most = Math.max(8, ...pairs.flat().map((request) => before(request) + request.tokens.length - this.first));
    this.longest = this.longestLatency() || 1;
  }

  /** Time since the previous token, or since arrival, of token `i` of a request; in one unit for both runs. */
  latency(request, i, run) {
    const store = this.stores[run], here = i - before(request), { chunk } = tokenAt(request, i);
    // Tokens of one step come together.
    if (tokenAt(request, i - 1)?.chunk === chunk) return 0;
    return this.inSeconds ? store.column("chunk.latency")[chunk] : store.latencySteps(request, here);
  }

  /** The longest inter-token latency. A time to first token may be longer; its bar is cut off. */
  longestLatency() {
    let longest = 0;
    for (const pair of this.pairs) {
      pair.forEach((request, run) => {
        for (let i = 1; i < request.tokens.length; i++) {
          longest = Math.max(longest, this.latency(request, before(request) + i, run) || 0);
        }
      });
    }
    return longest;
  }

  /** Left edge of a token. */
  x(index, width) {
    return LEFT + ((index - this.first) / this.most) * (width - RIGHT - LEFT);
  }

  /** Index of the token at a pixel. */
  at(x, width) {
    return this.first + Math.floor(((x - LEFT) / (width - RIGHT - LEFT)) * this.most);
  }

  drawAxis(context, width, y, colours) {
    for (const tick of ticks(this.first, this.first + this.most, 10, true)) {
      text(context, formatNumber(tick), this.x(tick, width), y, colours.muted, SMALL);
    }
    text(context, "token", LEFT - 8, y, colours.muted, SMALL, "right");
  }

  /** One request: bars up for a and down for b from `middle`, grey from the first difference on. */
  drawLane(context, row, width, middle, half, theme) {
    const { colours } = theme, [{ index }] = this.pairs[row], difference = this.differences[row];
    const fills = [theme.prefill(index), theme.decode(index)];
    this.pairs[row].forEach((request, run) => {
      request.tokens.forEach((_token, here) => {
        const i = before(request) + here;
        const x = this.x(i, width), wide = Math.max(0.8, this.x(i + 1, width) - x - 0.8);
        const high = Math.max(1.5, Math.min(1, this.latency(request, i, run) / this.longest) * half);
        context.fillStyle = difference >= 0 && i >= difference ? colours.kv : fills[run];
        context.fillRect(x, run ? middle + 0.5 : middle - 0.5 - high, wide, high);
      });
    });
    if (difference >= 0) markDifference(context, this.x(difference, width), middle, half, colours.bad);
  }

  /** Describe token `i` of a lane in both runs, with its step in the first run; null when neither has it. */
  describe(row, i) {
    const [a, b] = this.pairs[row], tokens = [tokenAt(a, i), tokenAt(b, i)];
    if (!tokens[0] && !tokens[1]) return null;
    const title = `${nameOf(a)}, token ${i + 1}: ${this.verdict(row, i)}`;
    return { lines: [title, this.tokenLine(row, i, 0), this.tokenLine(row, i, 1)], step: tokens[0]?.step };
  }

  verdict(row, i) {
    const difference = this.differences[row];
    if (!this.hasTokens) return "not recorded in both runs";
    if (difference < 0 && !this.pairs[row].every((request) => tokenAt(request, i))) return "in one run alone";
    if (difference < 0 || i < difference) return "the same token";
    return i === difference ? "the first difference" : `after the first difference, at token ${difference + 1}`;
  }

  tokenLine(row, i, run) {
    const name = run ? "B" : "A", request = this.pairs[row][run], token = tokenAt(request, i);
    if (!token) return `${name}: ${i < before(request) ? "before this part of the run" : "has ended"}`;
    const latency = this.latency(request, i, run), step = this.stores[run].label(token.step);
    const written = this.inSeconds ? formatSeconds(latency) : counted(latency, "step");
    return `${name}: ${this.tokenText(row, i, run)} (${
      this.stores[run].idWords(token.id)
    }) in step ${step}, after ${written}`;
  }

  /** The text of a token; a simulated run has none, but where it has the same token, the other run knows its text. */
  tokenText(row, i, run) {
    const [own, others] = [run, 1 - run].map((side) => tokenAt(this.pairs[row][side], i));
    const text = own.text || (others?.id === own.id ? others.text : "");
    return text ? plain(JSON.stringify(text), 40) : "no text";
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

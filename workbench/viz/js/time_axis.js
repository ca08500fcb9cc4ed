// Round times on an axis and their labels, which have one unit and one precision on each axis.
// workbench/viz/layout/axis.py has the same rule for pictures without scripts.

import { inMinutes, timeUnit } from "./dom.js";

/** Seconds between two labels in minutes or hours; a longer axis has days of 24 hours. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/**
 * The distance in seconds of at most `count` round times within a length.
 * @param {boolean} minutes Whether their labels are in minutes or hours.
 */
export function timeDistance(length, count, minutes) {
  const raw = length / Math.max(1, count);
  if (minutes && raw > 0.5) return STEPS.find((step) => step >= raw) ?? Math.ceil(raw / 86400) * 86400;
  const power = 10 ** Math.floor(Math.log10(raw));
  return Number(([1, 2, 5].find((factor) => factor * power >= raw * (1 - 1e-9)) ?? 10) * power);
}

/** The multiples of a distance in a range. */
export function multiples(from, to, distance) {
  const first = Math.ceil(from / distance - 1e-9), last = Math.floor(to / distance + 1e-9);
  return Array.from(
    { length: Math.max(0, last - first + 1) },
    (_, i) => Number(((first + i) * distance).toPrecision(12)),
  );
}

/** At most `count` round times of a range, and the function that writes each. The end has the unit, as in StepAxis. */
export function timeTicks(from, to, count) {
  const distance = timeDistance(to - from, count, inMinutes(to, to)), values = multiples(from, to, distance);
  return { values, label: timeLabel(values.at(-1) ?? to, to, distance) };
}

/** Room in pixels for the label of a time. */
const LABEL = 56;

/**
 * Round times of an axis that leaves out pauses, all at one distance, and with pauses the beginning of each stretch,
 * which is seldom round: then all labels have a digit more, down to a second of those in minutes, and a round time
 * leaves room for the beginning after it.
 * @param {number[][]} stretches The times between pauses.
 * @param {number} length The seconds that the axis shows.
 * @param {number} count The number of round times that fit on it.
 * @param {(time: number) => number} xOf The pixel of a time.
 * @param {number} right The right end of the axis in pixels.
 */
export function stretchTicks(stretches, length, count, xOf, right) {
  const span = stretches.at(-1)[1], paused = stretches.length > 1;
  const minutes = inMinutes(span, span), distance = timeDistance(length, count, minutes);
  const precision = paused ? Math.max(distance / 10, minutes && distance >= 1 ? 1 : 0) : distance;
  const values = stretches.flatMap(([from, to], i) => {
    const round = multiples(from, to, distance);
    if (!paused) return round;
    const next = stretches[i + 1], last = right + 8 - LABEL; // a label may end a little after the axis
    const end = next ? Math.min(xOf(next[0]), last) - LABEL : Infinity;
    return [from, ...round.filter((time) => time - from >= precision && xOf(time) <= end)];
  });
  return { values, label: timeLabel(values.at(-1) ?? span, span, precision) };
}

/**
 * The function that writes the times of one axis.
 * @param {number} largest The largest time on it, which decides about the unit of all.
 * @param {number} span Its length.
 * @param {number} precision The difference that two labels must show.
 */
export function timeLabel(largest, span, precision) {
  if (inMinutes(largest, span)) return clockLabel(largest >= 3600, precision);
  const [name, unit] = timeUnit(largest), digits = Math.min(12, places(precision / unit));
  const number = new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (time) => `${Math.abs(time) < precision * 1e-6 ? 0 : number.format(time / unit)} ${name}`;
}

/** Digits after the point that show a difference. */
const places = (precision) => Math.max(0, Math.ceil(-Math.log10(precision) - 1e-6));

/** Minutes and seconds, or hours and minutes, with seconds if the precision is below a minute. */
function clockLabel(hours, precision) {
  const pad = (number) => String(number).padStart(2, "0"), digits = places(precision);
  return (time) => {
    const unit = hours && precision >= 60 ? 60 : 1, all = Number((time / unit).toFixed(digits)) * unit;
    const whole = Math.floor(all), minutes = Math.floor(whole / 60);
    const seconds = `${pad(whole % 60)}${(all - whole).toFixed(digits).slice(1)}`;
    if (!hours) return `${minutes}:${seconds} min`;
    return `${Math.floor(minutes / 60)}:${pad(minutes % 60)}${unit === 60 ? "" : `:${seconds}`} h`;
  };
}

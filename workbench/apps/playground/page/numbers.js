// The run in a few numbers; beside those of the run it is compared with.

import { counted, formatSeconds } from "../../../viz/js/dom.js";
import { h } from "./elements.js";
import { explained } from "./terms.js";

/** A statistic of a latency in its unit, marked if it is a lower bound: times that had not ended can only grow. */
function statistic({ unit, ...summary }, latency, name) {
  const { bounds, [name]: value } = summary[latency], words = time(value, unit);
  return bounds.includes(name) && words !== "–" ? `≥ ${words}` : words;
}

/** A time in a unit, "s" or "steps"; a dash without a unit, in which two runs could be compared. */
function time(value, unit) {
  if (value === null || value === undefined || !unit) return "–";
  if (unit === "s") return formatSeconds(value);
  const steps = value.toLocaleString("en", { maximumFractionDigits: 1 });
  return `${steps} ${steps === "1" ? "step" : "steps"}`;
}

const count = (value) => value.toLocaleString("en");
const percent = (value) => value === null ? "–" : `${(100 * value).toFixed(0)}%`;

/** Output tokens per second without idle time, as *Compare* below has them. */
function rate({ unit, num_output_tokens: count, at_work: atWork }) {
  return unit === "s" && atWork > 0 ? (count / atWork).toFixed(1) : "–";
}

const OF_CACHED = "Tokens that were found in the prefix cache, also by requests that come back after a preemption.";

/** Ends of titles of a run that has idle time. */
const OF_IDLE = { "output tokens/s": " without idle time", duration: " with idle time" };

/**
 * Titles of the columns, their value in a summary, the term that explains the title, and what is said before that.
 * @type {[string, (summary: any) => string, string?, string?][]}
 */
const COLUMNS = [
  ["first token, mean", (s) => statistic(s, "ttft", "mean"), "TTFT"],
  ["P99", (s) => statistic(s, "ttft", "p99"), "TTFT"],
  ["output tokens/s", rate],
  ["between tokens, mean", (s) => statistic(s, "itl", "mean"), "ITL"],
  ["P99", (s) => statistic(s, "itl", "p99"), "ITL"],
  ["longest", (s) => statistic(s, "itl", "max"), "ITL"],
  ["duration", (s) => time(s.duration, s.unit)],
  ["steps", (s) => count(s.num_steps), "step"],
  ["budget used", (s) => percent(s.mean_budget_use), "budget"],
  ["cached tokens", (s) => count(s.num_cached_tokens), "prefix caching", OF_CACHED],
  ["preemptions", (s) => count(s.num_preemptions), "preemption"],
  ["recomputed", (s) => count(s.num_recomputed_tokens), "preemption"],
];

/** @type {typeof COLUMNS} Columns that fleets have after the third of these. */
const OF_FLEETS = [
  ["hit rate", (s) => percent(s.hit_rate), "hit rate"],
  ["busiest replica", (s) => percent(s.busiest)],
];

const AT_LEAST = "≥ marks what is at least that: a request without a first token counts with the time so far.";

/** Sentences about runs that did not come to their end. */
const OF_ENDS = {
  stuck: "Some requests can never be scheduled: the run ended without them.",
  part: "This is a part of a longer run.",
};

/** Fill an element with the table of one run or two, which have one unit of time. */
export function showNumbers(element, { summary, other, end, pinned }) {
  const rows = other ? [["A", summary], ["B", other]] : [[pinned ? "A" : "now", summary]];
  const cell = (text) => h("td", {}, text);
  const isFleet = rows.some(([, values]) => values.replicas > 1);
  const hasIdle = rows.some(([, values]) => values.clock.idle > 0);
  const columns = [...COLUMNS.slice(0, 3), ...isFleet ? OF_FLEETS : [], ...COLUMNS.slice(3)];
  const head = h(
    "tr",
    {},
    h("td", {}),
    columns.map(([title, , term, more]) => {
      const whole = title + (hasIdle ? OF_IDLE[title] ?? "" : "");
      return h("th", { scope: "col" }, term ? explained(whole, term, more) : whole);
    }),
  );
  const body = rows.map(([name, values]) =>
    h("tr", {}, h("th", { scope: "row" }, name), columns.map(([, of]) => cell(of(values))))
  );
  element.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
  if (rows.some(([, { ttft }]) => ttft.bounds.length)) element.append(h("p", {}, AT_LEAST));
  const without = rows.filter(([, { unit }]) => !unit).map(([name]) => name);
  if (without.length) {
    const have = `${without.join(" and ")} ${without.length > 1 ? "have" : "has"} no times`;
    element.append(
      h("p", {}, `${have}, and a step of B may hold more or less than one of A: only counts are compared.`),
    );
  }
  const words =
    { ...OF_ENDS, max_steps: `The run was stopped after ${counted((other ?? summary).num_steps, "step")}.` }[end];
  if (words) element.append(h("p", {}, words));
}

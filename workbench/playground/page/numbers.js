// The run in a few numbers; beside those of the run it is compared with.

import { h } from "./elements.js";

function time(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit !== "s") return value.toLocaleString("en", { maximumFractionDigits: 1 });
  return value >= 1 ? `${value.toPrecision(3)} s` : `${(value * 1000).toPrecision(3)} ms`;
}

const count = (value) => value.toLocaleString("en");
const percent = (value) => value === null ? "–" : `${(100 * value).toFixed(0)} %`;

/**
 * Titles of the columns, and their value in a summary.
 * @type {[string, (summary: any) => string][]}
 */
const COLUMNS = [
  ["steps", (s) => count(s.num_steps)],
  ["duration", (s) => time(s.duration, s.unit)],
  ["first token, mean", (s) => time(s.ttft.mean, s.unit)],
  ["p99", (s) => time(s.ttft.p99, s.unit)],
  ["between tokens, mean", (s) => time(s.itl.mean, s.unit)],
  ["longest", (s) => time(s.itl.max, s.unit)],
  ["output tokens/s", (s) => s.unit === "s" ? s.output_throughput?.toFixed(1) ?? "–" : "–"],
  ["budget used", (s) => percent(s.mean_budget_use)],
  ["from the cache", (s) => count(s.num_cached_tokens)],
  ["preemptions", (s) => count(s.num_preemptions)],
  ["computed again", (s) => count(s.num_recomputed_tokens)],
];

/** Fill an element with the table of one run or two. */
export function showNumbers(element, { summary, other, end }) {
  const rows = other ? [["A", summary], ["now", other]] : [["", summary]];
  const cell = (text) => h("td", {}, text);
  const head = h("tr", {}, other ? h("td", {}) : [], COLUMNS.map(([title]) => h("th", { scope: "col" }, title)));
  const body = rows.map(([name, values]) =>
    h("tr", {}, other ? h("th", { scope: "row" }, name) : [], COLUMNS.map(([, of]) => cell(of(values))))
  );
  element.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
  if (end === "stuck") element.append(h("p", {}, "Some requests can never be scheduled: the run ended without them."));
  if (end === "max_steps") element.append(h("p", {}, "The run was stopped after 20,000 steps."));
}

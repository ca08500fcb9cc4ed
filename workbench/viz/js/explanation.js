// The parts of a request's time in the drawer: a stacked bar for each span, and a list of its causes, with links to the
// requests behind them and to their steps.

import { formatNumber, h, plain } from "./dom.js";

/**
 * @param view
 * @param facts The host's answer; see `explanation_facts` in layout/explanation.py.
 * @param inspector Makes the links.
 */
export function explanation(view, facts, inspector) {
  const said = [facts.verdict, facts.confirmation].map((words) => words && h("p", { class: "wb-confirmation" }, words));
  const biggest = facts.spans[0]?.parts.find((part) => !part.is_own)?.kind;
  const spans = facts.spans.map((span) => spanOf(view, span, (part) => markOf(part, biggest), inspector));
  const legend = [facts.division, biggest ? BIGGEST : ""].filter(Boolean).join(" ");
  return h("section", { class: "wb-why" }, said, spans, legend && h("p", { class: "wb-hint" }, legend));
}

const BIGGEST = "Red is the largest part of the whole time that is not the request's own computation or idle time.";

/** The pattern of a cause, the same in all cards, and its colour: red for the biggest part that could be avoided. */
function markOf({ kind, is_own: isOwn, mark: [pattern, weave] }, biggest) {
  const colour = isOwn ? "own" : kind === biggest ? "biggest" : "other";
  return { "data-kind": colour, "data-pattern": pattern, "data-weave": weave };
}

function spanOf(view, { name, total, parts }, markOf, inspector) {
  const widths = parts.map((part) => ({ style: `flex-grow: ${part.share}`, title: wordsOf(part) }));
  const bar = h(
    "div",
    { class: "wb-bar-of-parts", role: "img", "aria-label": parts.map(wordsOf).join("; ") },
    parts.map((part, i) => h("i", { ...markOf(part), ...widths[i] })),
  );
  const rows = parts.map((part) => part.is_listed && rowOf(view, part, markOf(part), inspector));
  return [h("h4", {}, `${name}: ${total}`), bar, h("ul", {}, rows)];
}

const wordsOf = ({ cause, amount, share }) => `${cause}: ${amount}, ${Math.round(100 * share)}%`;

function rowOf(view, part, mark, inspector) {
  const culprits = part.culprits.flatMap((id, i) => {
    const request = view.store.byId.get(id);
    const words = part.tokens[i], comma = i + 1 < part.culprits.length ? "," : "";
    const parting = i ? " " : ": ";
    if (!request) return [parting, plain(id), words, comma];
    // A button is a box: a comma behind one that fills its line would stand alone on the next.
    const link = inspector.toRequest(request), isIn = comma && !words;
    const name = h("span", { class: "wb-underlined" }, link.words);
    const inside = isIn ? [name, h("span", { "aria-hidden": "true" }, comma)] : [name];
    return [parting, inspector.elementOf({ ...link, words: inside }), words, isIn ? "" : comma];
  });
  const more = part.more ? ` and ${part.more}` : "";
  const { store } = view,
    linked = (label, words) => {
      const step = label - store.label(0), isHere = step >= 0 && step < store.numSteps;
      return isHere ? inspector.elementOf(inspector.toStep(step, words)) : words;
    };
  const step = linked(part.first, `step ${formatNumber(part.first)}`);
  const until = part.last > part.first && [" to ", linked(part.last, formatNumber(part.last))];
  return h(
    "li",
    {},
    h("i", { class: "wb-part", ...mark }),
    h("b", {}, part.amount),
    h("span", {}, part.cause, culprits, more, " (", step, until, ")"),
  );
}

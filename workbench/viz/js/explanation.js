// The parts of a request's time in the drawer: a stacked bar for each span, and a list of its causes, with links to the
// requests behind them and to their steps.

import { formatNumber, h, plain } from "./dom.js";

/**
 * @param view
 * @param facts The host's answer; see `explanation_facts` in layout/explanation.py.
 * @param inspector Makes the links.
 */
export function explanation(view, facts, inspector) {
  const said = facts.confirmation && h("p", { class: "wb-confirmation" }, facts.confirmation);
  const spans = facts.spans.map((span) => spanOf(view, span, inspector));
  return h("section", { class: "wb-why" }, said, spans, facts.division && h("p", { class: "wb-hint" }, facts.division));
}

function spanOf(view, { name, total, parts }, inspector) {
  const biggest = parts.findIndex((part) => !part.is_own);
  const kindOf = (part, i) => part.is_own ? "own" : i === biggest ? "biggest" : "other";
  // Parts of a kind share its grey, so each has a pattern.
  const patternOf = (i) => parts.slice(0, i).filter((part, j) => kindOf(part, j) === kindOf(parts[i], i)).length % 5;
  const marked = (part, i) => ({ "data-kind": kindOf(part, i), "data-pattern": patternOf(i) });
  const bar = h(
    "div",
    { class: "wb-bar-of-parts", role: "img", "aria-label": parts.map(wordsOf).join("; ") },
    parts.map((part, i) => h("i", { ...marked(part, i), style: `flex-grow: ${part.share}`, title: wordsOf(part) })),
  );
  const rows = parts.map((part, i) => part.is_listed && rowOf(view, part, marked(part, i), inspector));
  return [h("h4", {}, `${name}: ${total}`), bar, h("ul", {}, rows)];
}

const wordsOf = ({ cause, amount, share }) => `${cause}: ${amount}, ${Math.round(100 * share)}%`;

function rowOf(view, part, mark, inspector) {
  const culprits = part.culprits.flatMap((id, i) => {
    const request = view.store.byId.get(id);
    const name = inspector.elementOf(request ? inspector.toRequest(request) : plain(id));
    return [i ? ", " : ": ", name, part.tokens[i]];
  });
  const more = part.more ? ` and ${part.more}` : "";
  const first = view.store.label(0), step = inspector.elementOf(inspector.toStep(part.first - first));
  const until = part.last > part.first &&
    [" to ", inspector.elementOf(inspector.toStep(part.last - first, formatNumber(part.last)))];
  return h(
    "li",
    {},
    h("i", { class: "wb-part", ...mark }),
    h("b", {}, part.amount),
    h("span", {}, part.cause, culprits, more, " (", step, until, ")"),
  );
}

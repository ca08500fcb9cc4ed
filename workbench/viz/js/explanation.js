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
  return h("section", { class: "wb-why" }, said, facts.spans.map((span) => spanOf(view, span, inspector)));
}

function spanOf(view, { name, total, parts }, inspector) {
  const biggest = parts.findIndex((part) => !part.is_own);
  const kindOf = (part, i) => part.is_own ? "own" : i === biggest ? "biggest" : "other";
  const bar = h(
    "div",
    { class: "wb-bar-of-parts", role: "img", "aria-label": parts.map(wordsOf).join("; ") },
    parts.map((part, i) =>
      h("i", { "data-kind": kindOf(part, i), style: `flex-grow: ${part.share}`, title: wordsOf(part) })
    ),
  );
  const rows = parts.map((part, i) => part.is_listed && rowOf(view, part, kindOf(part, i), inspector));
  return [h("h4", {}, `${name}: ${total}`), bar, h("ul", {}, rows)];
}

const wordsOf = ({ cause, amount, share }) => `${cause}: ${amount}, ${Math.round(100 * share)}%`;

function rowOf(view, part, kind, inspector) {
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
    h("i", { class: "wb-part", "data-kind": kind }),
    h("b", {}, part.amount),
    h("span", {}, part.cause, culprits, more, " (", step, until, ")"),
  );
}

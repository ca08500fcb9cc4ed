// Words that explain themselves when they are pointed at or tapped; the list of them is in the dialog of the keyboard.

import { h } from "./dom.js";

/** @type {Record<string, string>} */
const TERMS = /** @type {any} */ ("__GLOSSARY__");

const byWord = new Map(Object.entries(TERMS).map(([word, meaning]) => [word.toLowerCase(), [word, meaning]]));
const longestFirst = [...byWord.keys()].sort((a, b) => b.length - a.length).map((word) => word.replace(" ", "\\s"));
const PATTERN = new RegExp(`\\b(${longestFirst.join("|")})(e?s)?\\b`, "gi");

/** A text as parts: its terms as elements, the rest as text. */
export function withTerms(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(PATTERN)) {
    parts.push(text.slice(from, found.index));
    parts.push(h("span", { class: "wb-term", "data-term": found[1].toLowerCase() }, found[0]));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

/** Show the meaning of a term below a root that is pointed at or tapped. */
export function explainTerms(root, tooltip) {
  const show = (event) => {
    const [word, meaning] = byWord.get(event.target.closest?.(".wb-term")?.dataset.term) || [];
    if (word) tooltip.show(event, [word, meaning]);
  };
  root.addEventListener("pointerover", show);
  root.addEventListener("click", show);
  root.addEventListener("pointerout", ({ target }) => target.closest?.(".wb-term") && tooltip.hide());
}

/** Every term with its meaning, as a list. */
export function termList() {
  const entries = [...byWord.values()].map(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)]);
  return h("dl", { class: "wb-keys wb-terms" }, entries);
}

// Words of the controls and of the numbers explain themselves when they are pointed at or tapped, and when the keyboard
// comes to their control. The glossary is the dashboard's.

import { h } from "./elements.js";

const { glossary } = await (await fetch(new URL("presets.json", import.meta.url))).json();

const meanings = new WeakMap();
const tip = h("div", { id: "tip", role: "tooltip" });
tip.hidden = true;
document.body.append(tip);

/** An element for words that are, or use, a term of the glossary ("" for none); `more` is said before its meaning. */
export function explained(words, term, more = "", field = "") {
  const element = h("span", { class: "term" }, words);
  const meaning = [more, glossary[term], field && `The field is ${field}.`].filter(Boolean).join(" ");
  meanings.set(element, meaning);
  return element;
}

/** The meaning of an element made by `explained`, for a control beside it. */
export const meaningOf = (element) => meanings.get(element);

function show({ type, target }) {
  const control = type === "focusin" && target.closest("label"), element = control || target;
  const term = control ? control.querySelector(".term") : element.closest?.(".term");
  if (!term || (type === "focusin" && !target.matches(":focus-visible"))) return hide();
  tip.textContent = meanings.get(term);
  tip.hidden = false;
  const box = term.getBoundingClientRect(), { width, height } = tip.getBoundingClientRect();
  // Below the numbers that a heading is of, not over them.
  const bottom = (term.closest("table") ?? term).getBoundingClientRect().bottom + 6;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 8))}px`;
  tip.style.top = `${bottom + height <= innerHeight ? bottom : Math.max(4, box.top - height - 6)}px`;
}

function hide() {
  tip.hidden = true;
}

// A word that moves below a resting pointer is not pointed at.
for (const type of ["pointermove", "click", "focusin"]) addEventListener(type, show);
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", ({ key }) => key === "Escape" && hide());

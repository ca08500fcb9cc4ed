// The theme wraps wide tables in a region that scrolls; the keyboard has to reach it.
addEventListener("load", () => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap")) region.tabIndex = 0;
});

// It puts a navigation with a button on each block of code that comes into sight: a landmark, which needs its own name.
let numBlocks = 0;
const nameBlocks = () => {
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([aria-label])")) {
    buttons.setAttribute("aria-label", `Code ${++numBlocks}`);
  }
};
addEventListener("DOMContentLoaded", () => {
  new MutationObserver(nameBlocks).observe(document.body, { childList: true, subtree: true });
  nameBlocks();
});

// To its search a leading dash means "without this word", so that an option such as --max-num-seqs would find nothing.
addEventListener("keyup", ({ target }) => {
  if (target instanceof HTMLInputElement && target.dataset.mdComponent === "search-query" && /(^|\s)-/.test(target.value)) {
    target.value = target.value.replace(/(^|\s)-+/g, "$1");
  }
}, true);

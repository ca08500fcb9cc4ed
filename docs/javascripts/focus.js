// The theme wraps wide tables in a region that scrolls; the keyboard has to reach it.
addEventListener("load", () => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap")) region.tabIndex = 0;
});

// It puts a navigation with one button on each block of code that comes into sight: groups, not landmarks without a name.
const toGroups = () => {
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([role])")) buttons.setAttribute("role", "group");
};
addEventListener("DOMContentLoaded", () => {
  new MutationObserver(toGroups).observe(document.body, { childList: true, subtree: true });
  toGroups();
});

// The theme wraps wide tables in a region that scrolls; the keyboard has to reach it.
addEventListener("load", () => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap")) region.tabIndex = 0;
});

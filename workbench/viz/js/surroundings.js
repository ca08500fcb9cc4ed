// The surroundings of a view: its size, the visibility of its panels, and the theme of the page.

import { h } from "./dom.js";

/** Attributes of the page's body with which notebooks and editors announce their theme. */
const THEME_ATTRIBUTES = ["data-jp-theme-light", "data-vscode-theme-kind"];

const NARROW_PIXELS = 860;

/** From this width on, a bar of the cursor has room for its longest button. */
const WIDE_PIXELS = 1060;

/** Below this height the bars are folded, so that two thirds of it are left to the pictures. */
const LOW_PIXELS = 600;

/**
 * Hide the still picture of a view, an output beside it in a notebook, while the view is here.
 * @param {string} [name] Class of the picture.
 * @returns A function that shows it again.
 */
export function hideStill(name) {
  if (!name) return () => {};
  const rule = h("style", {}, `.${name} { display: none; }`);
  document.head.append(rule);
  return () => rule.remove();
}

/** Watch them for a view; returns a function that ends the watching. */
export function watchSurroundings(view) {
  const { root, panels, options } = view;
  const size = new ResizeObserver(() => {
    const height = options.height ?? (options.page ? innerHeight : LOW_PIXELS);
    root.dataset.low = String(height < LOW_PIXELS);
    root.dataset.narrow = String(root.clientWidth < NARROW_PIXELS);
    root.dataset.wide = String(root.clientWidth >= WIDE_PIXELS);
    for (const panel of panels) panel.resized();
    view.requestFrame();
  });
  size.observe(root);
  const visibility = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      panels.find((panel) => panel.element === target).visible = isIntersecting;
    }
    view.requestFrame();
  }, { rootMargin: "200px" });
  for (const panel of panels) visibility.observe(panel.element);
  const applyTheme = () => view.applyTheme();
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", applyTheme);
  const page = new MutationObserver(applyTheme);
  page.observe(document.body, { attributes: true, attributeFilter: THEME_ATTRIBUTES });
  return () => {
    for (const observer of [size, visibility, page]) observer.disconnect();
    system.removeEventListener("change", applyTheme);
  };
}

// The surroundings of a view: its size, the visibility of its panels, and the theme of the page.

import { h } from "./dom.js";

/** Attributes of the page's body with which notebooks and editors announce their theme. */
const THEME_ATTRIBUTES = ["data-jp-theme-light", "data-vscode-theme-kind"];

const NARROW_PIXELS = 860;

/** From this width on, a bar of the cursor has room for its longest button. */
const WIDE_PIXELS = 1060;

/** Below this height the bars are folded, so that two thirds of it are left to the pictures. */
const LOW_PIXELS = 600;

/** Width in pixels that fits a page of A4 or Letter, within usual margins. */
const PAPER_PIXELS = 690;

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
  const { root, panels, options, controls: { element: bars, message } } = view;
  const measure = () => {
    const height = options.height ?? (options.page ? innerHeight : LOW_PIXELS);
    root.dataset.low = String(height < LOW_PIXELS);
    root.dataset.narrow = String(root.clientWidth < NARROW_PIXELS);
    root.dataset.wide = String(root.clientWidth >= WIDE_PIXELS);
    for (const panel of panels) panel.resized();
    view.requestFrame();
  };
  const size = new ResizeObserver(measure), endPrinting = watchPrinting(view, measure);
  size.observe(root);
  if (options.height) root.style.setProperty("--wb-height", `${options.height}px`);
  const sizeOfBars = new ResizeObserver(() => {
    root.style.setProperty("--wb-bars", `${bars.offsetHeight}px`);
    root.style.setProperty("--wb-message-top", `${message.offsetTop}px`);
  });
  sizeOfBars.observe(bars);
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
    for (const observer of [size, sizeOfBars, visibility, page]) observer.disconnect();
    system.removeEventListener("change", applyTheme);
    endPrinting();
  };
}

/** An image of a canvas in its place: Chromium prints some canvases blank that have changed just before. */
function imageOf(canvas) {
  const image = h("img", { class: `${canvas.className} wb-printed`, src: canvas.toDataURL(), alt: "" });
  image.style.cssText = canvas.style.cssText;
  canvas.before(image);
  return image;
}

/**
 * On paper the view is as wide as a page, and light. All panels are drawn before the printer looks, those out of sight
 * too; what is a control has its rule in page.css. Returns a function that ends the watching.
 */
function watchPrinting(view, measure) {
  const { root, theme, panels } = view, paper = matchMedia("print");
  let before = null, images = [];
  const lay = (width, choice, isSeen) => {
    root.style.width = width;
    theme.choice = choice;
    view.applyTheme();
    measure();
    panels.forEach((panel, i) => panel.visible = isSeen[i]);
    view.changed("data");
    view.draw();
  };
  const begin = () => {
    if (before) return;
    before = [root.style.width, theme.choice, panels.map((panel) => panel.visible)];
    root.dataset.printing = "true";
    lay(`${PAPER_PIXELS}px`, "light", panels.map(() => true));
    images = [...root.querySelectorAll("canvas")].filter(({ offsetWidth }) => offsetWidth).map(imageOf);
  };
  const end = () => {
    if (!before) return;
    delete root.dataset.printing;
    for (const image of images) image.remove();
    lay(...before);
    before = null;
  };
  const turn = () => paper.matches ? begin() : end();
  addEventListener("beforeprint", begin);
  addEventListener("afterprint", end);
  paper.addEventListener("change", turn);
  return () => {
    removeEventListener("beforeprint", begin);
    removeEventListener("afterprint", end);
    paper.removeEventListener("change", turn);
  };
}

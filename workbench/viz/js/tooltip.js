// The tooltip of a view, beside the pointer: there as long as what it is about, and while nothing is dragged.

import { h, replace } from "./dom.js";

export class Tooltip {
  constructor(root) {
    this.element = h("div", { class: "wb-tooltip", role: "tooltip", hidden: true });
    this.about = null; // the element below the pointer while it is shown
    const scrolled = ({ target }) => (!root.contains(target) || target.contains(this.about)) && this.hide();
    root.addEventListener("pointerdown", () => this.hide(), true);
    root.addEventListener("scroll", scrolled, true); // a served page is in a shadow tree, which keeps its events
    globalThis.addEventListener("scroll", scrolled, true);
    this.end = () => globalThis.removeEventListener("scroll", scrolled, true);
  }

  /**
   * Show lines beside the pointer; the first line is the title. `below` is shown below them. While a button is held
   * something is dragged, over which nothing is shown.
   */
  show({ clientX: x, clientY: y, target, buttons }, lines, below = []) {
    if (buttons) return this.hide();
    this.about = target;
    const text = [...lines, ...below.map((element) => element.textContent)].join("\n");
    if (text !== this.text) {
      replace(this.element, lines.map((line, i) => h("div", i ? {} : { class: "wb-tooltip-title" }, line)), below);
      this.text = text;
    }
    this.element.hidden = false;
    this.element.style.left = "0"; // near the right edge it would be narrower, and higher, than where it will be
    const { width, height } = this.element.getBoundingClientRect(), fits = y + 18 + height <= innerHeight;
    this.element.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.element.style.top = `${fits ? y + 18 : Math.max(4, y - height - 12)}px`;
  }

  hide() {
    this.element.hidden = true;
    this.about = null;
  }

  /** Leave if what it is about has left the page. */
  update() {
    if (this.about && !this.about.checkVisibility()) this.hide();
  }
}

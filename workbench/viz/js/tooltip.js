// The tooltip of a view.

import { h, replace } from "./dom.js";

export class Tooltip {
  constructor() {
    this.element = h("div", { class: "wb-tooltip", role: "tooltip", hidden: true });
  }

  /** Show lines near a point of the window; the first line is the title. `below` is shown below them. */
  show(x, y, lines, below = []) {
    const text = [...lines, ...below.map((element) => element.textContent)].join("\n");
    if (text !== this.text) {
      replace(this.element, lines.map((line, i) => h("div", i ? {} : { class: "wb-tooltip-title" }, line)), below);
      this.text = text;
    }
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect(), fits = y + 18 + height <= innerHeight;
    this.element.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.element.style.top = `${fits ? y + 18 : Math.max(4, y - height - 12)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

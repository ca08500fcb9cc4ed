// The one tooltip of a view.

import { h, replace } from "./dom.js";

export class Tooltip {
  constructor() {
    this.element = h("div", { class: "wb-tooltip", role: "tooltip", hidden: true });
  }
  show(x, y, lines) {
    const text = lines.join("\n");
    if (text !== this.text) {
      replace(this.element, lines.map((line, i) => h("div", i ? {} : { class: "wb-tooltip-title" }, line)));
      this.text = text;
    }
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    this.element.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    this.element.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  }
  hide() {
    this.element.hidden = true;
  }
}

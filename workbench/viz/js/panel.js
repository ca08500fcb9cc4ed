// What all panels have in common: a titled section with a table twin, and for drawn panels two canvases, one for
// what changes with the data and one above it for the cursor and the hover, so that moving them repaints little.

import { h, replace, table } from "./dom.js";
import { clearedContext } from "./drawing.js";

export class Panel {
  /** @param view {store, cursor, theme, tooltip, send, changed} @param options {id, title, hint} */
  constructor(view, { id, title, hint }) {
    Object.assign(this, { view, id, title });
    this.asTable = false;
    this.hintElement = h("span", { class: "wb-hint" }, hint || "");
    this.tableButton = h("button", {
      class: "wb-quiet", "aria-pressed": "false", title: `${title} as a table`, onclick: () => this.showTable(!this.asTable),
    }, "Table");
    this.tools = h("span", { class: "wb-tools" });
    this.body = h("div", { class: "wb-body" });
    this.twin = h("div", { class: "wb-twin", tabindex: 0, hidden: true });
    this.element = h("section", { class: `wb-panel wb-panel-${id}`, "data-panel": id, "aria-label": title },
      h("header", {}, h("h3", {}, title), this.hintElement, this.tools, this.tableButton), this.body, this.twin);
    this.stale = new Set(["data"]);
    this.visible = true;
  }

  get store() { return this.view.store; }
  get cursor() { return this.view.cursor; }
  get theme() { return this.view.theme; }

  /**
   * Which changes make the panel draw again. "grown": there are more steps, which is nothing to a panel of one step;
   * "data": anything else of the trace, and everything that is as thorough; "status": what the host says; "step",
   * "hover", "range", "select" and "focus": the cursor and what is marked; "theme".
   */
  needs(what) {
    return what !== "hover" && what !== "grown";
  }

  changed(what) {
    if (this.needs(what) || this.asTable) this.stale.add(what);
  }

  showTable(on) {
    this.asTable = on;
    this.tableButton.setAttribute("aria-pressed", String(on));
    this.body.hidden = on;
    this.twin.hidden = !on;
    this.stale.add("data");
    this.view.requestFrame();
  }

  frame() {
    if (!this.stale.size || !this.visible) return;
    if (this.asTable) {
      if (["grown", "data", "step", "select", "focus"].some((what) => this.stale.has(what))) {
        const { headings, rows, caption, onclick } = this.tableTwin();
        const top = this.twin.scrollTop;
        replace(this.twin, table(headings, rows, { caption, onclick }));
        this.twin.scrollTop = top;
      }
    } else {
      this.render(this.stale);
    }
    this.stale.clear();
  }

  render() {}
  resized() {}
  tableTwin() { return { headings: [], rows: [] }; }
}

export class CanvasPanel extends Panel {
  /** @param options {id, title, hint, height} with height in CSS pixels */
  constructor(view, options) {
    super(view, options);
    this.height = options.height;
    this.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": options.title });
    this.overlay = h("canvas", { class: "wb-overlay", "aria-hidden": "true" });
    this.holder = h("div", { class: "wb-canvas" }, this.canvas, this.overlay);
    this.body.append(this.holder);
    this.width = 0;
    this.canvas.addEventListener("pointermove", (event) => this.pointer(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.view.tooltip.hide();
      this.cursor.setHover({});
    });
    this.canvas.addEventListener("click", (event) => {
      const hit = this.hit(event.offsetX, event.offsetY);
      if (hit) this.clicked(hit, event);
    });
  }

  /** Redraw the base canvas for these changes; everything else only redraws the overlay. */
  base(what) {
    return what !== "hover" && what !== "step";
  }

  needs(what) { return what !== "status" && what !== "grown"; }

  resized() {
    const width = Math.floor(this.holder.clientWidth);
    if (width > 0 && width !== this.width) {
      this.width = width;
      this.stale.add("data");
    }
  }

  setHeight(height) {
    if (Math.abs(height - this.height) > 0.5) this.height = height;
  }

  render(stale) {
    if (!this.width) this.resized();
    if (!this.width) return;
    if ([...stale].some((what) => this.base(what))) {
      this.layout?.();
      const context = this.prepare(this.canvas);
      this.draw(context, this.width, this.height);
      this.canvas.setAttribute("aria-label", `${this.title}: ${this.describe()}`);
    }
    // An overlay that is empty and stays empty is left alone: even clearing a canvas makes the browser present it.
    const shows = this.showsOverlay();
    if (shows || this.overlayShown) this.drawOverlay(this.prepare(this.overlay), this.width, this.height);
    this.overlayShown = shows;
  }

  /** Whether there is anything to draw above the picture; panels with a cursor line always have it. */
  showsOverlay() {
    return this.cursor.selected !== null || Object.keys(this.cursor.hover).length > 0;
  }

  /** The cleared context of a canvas that covers the panel from `left` on, in the panel's own coordinates. */
  prepare(canvas, left = 0) {
    const ratio = globalThis.devicePixelRatio || 1;
    const width = Math.round((this.width - left) * ratio), height = Math.round(this.height * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.width = `${this.width - left}px`;
      canvas.style.height = `${this.height}px`;
      canvas.style.left = `${left}px`;
      this.holder.style.height = `${this.height}px`;
    }
    return clearedContext(canvas, left, this.width - left, this.height);
  }

  pointer(event) {
    const hit = this.hit(event.offsetX, event.offsetY);
    if (!hit) {
      this.view.tooltip.hide();
      return this.cursor.setHover({});
    }
    this.cursor.setHover(hit.hover || {});
    if (hit.lines) this.view.tooltip.show(event.clientX, event.clientY, hit.lines);
    else this.view.tooltip.hide();
  }

  draw() {}
  drawOverlay() {}
  /** What lies under a point: { hover, lines, step, request } or null. */
  hit() { return null; }
  clicked(hit) {
    if (hit.step !== undefined) this.cursor.seek(hit.step);
  }
  describe() { return ""; }
}

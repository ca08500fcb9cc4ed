// The common part of all panels: a titled section that can also be shown as a table. Drawn panels have two canvases,
// the picture and above it an overlay for the cursor and the hover, so that moving them repaints little.

import { h, replace, setText, table } from "./dom.js";
import { clearedContext } from "./drawing.js";
import { pictureButtons } from "./picture.js";
import { withTerms } from "./terms.js";
import { shownGroup } from "./words.js";

/** Changes after which a panel shown as a table is filled again. */
const TABLE_CHANGES = ["grown", "data", "step", "select", "focus", "range"];

export class Panel {
  /**
   * @param view The view, with its store, cursor, theme and tooltip.
   * @param {{ id: string, title: string, hint: string, height?: number }} options
   */
  constructor(view, { id, title, hint }) {
    this.view = view;
    this.id = id;
    this.title = title;
    this.asTable = false;
    this.hintElement = h("span", { class: "wb-hint" }, withTerms(hint));
    const name = `Table: show ${title} as a table`;
    const props = { class: "wb-quiet", type: "button", "aria-pressed": "false", title: name, "aria-label": name };
    this.tableButton = h("button", { ...props, onclick: () => this.showTable(!this.asTable) }, "Table");
    this.tools = h("span", { class: "wb-tools" });
    this.body = h("div", { class: "wb-body" });
    this.tableView = h("div", { class: "wb-table-view", tabindex: 0, hidden: true });
    this.element = h(
      "section",
      { class: `wb-panel wb-panel-${id}`, "data-panel": id, "aria-label": title },
      h("header", {}, h("h3", {}, withTerms(title)), this.hintElement, this.tools, this.tableButton),
      this.body,
      this.tableView,
    );
    this.stale = new Set(["data"]);
    this.visible = true;
  }

  get store() {
    return this.view.store;
  }

  get cursor() {
    return this.view.cursor;
  }

  get theme() {
    return this.view.theme;
  }

  /**
   * Whether a change makes the panel render again. The changes are
   * - "grown": there are more steps, which means nothing to a panel of one step,
   * - "data": any other change of the trace, and any other reason to draw everything again,
   * - "status": a change of the engine's status,
   * - "step", "hover", "range", "select", "focus": a change of the cursor or the marks,
   * - "pin": another object in the inspector,
   * - "theme": another theme.
   */
  needs(what) {
    return what !== "hover" && what !== "grown" && what !== "pin";
  }

  changed(what) {
    if (this.needs(what) || this.asTable) this.stale.add(what);
  }

  /** Render again in the next frame. */
  redraw() {
    this.stale.add("data");
    this.view.requestFrame();
  }

  /** Show the panel as a table or as a picture; the focus moves from the one to the other. */
  showTable(on) {
    const [shown, hidden] = on ? [this.tableView, this.body] : [this.body, this.tableView];
    const focused = hidden.contains(hidden.getRootNode().activeElement);
    this.asTable = on;
    this.tableButton.setAttribute("aria-pressed", String(on));
    hidden.hidden = true;
    shown.hidden = false;
    if (focused) {
      (shown.matches("[tabindex]") ? shown : shown.querySelector("[tabindex]"))?.focus({ preventScroll: true });
    }
    this.redraw();
  }

  /** Render what is stale; outside the window, where a screen reader reads on, only when the view has settled. */
  frame(settled = false) {
    if (!this.stale.size || !(this.visible || (settled && this.element.offsetParent))) return;
    if (!this.asTable) this.render(this.stale);
    else if (TABLE_CHANGES.some((what) => this.stale.has(what))) this.fillTableView();
    this.stale.clear();
  }

  fillTableView() {
    const { headings, rows, caption, onclick } = this.tableData();
    const top = this.tableView.scrollTop;
    replace(this.tableView, table(headings, rows, { caption, onclick }));
    this.tableView.scrollTop = top;
  }

  /** Name the KV cache group that is drawn, above the picture or table, if there are several. */
  nameGroup() {
    const words = shownGroup(this.store);
    if (words && !this.group) this.body.before(this.group = h("p", { class: "wb-facts" }));
    if (this.group) setText(this.group, words);
  }

  render(_stale) {}

  resized() {}

  /** @returns {{ headings: string[], rows: any[], caption?: string, onclick?: (row: any) => void }} */
  tableData() {
    return { headings: [], rows: [] };
  }
}

export class CanvasPanel extends Panel {
  /** @param {{ id: string, title: string, hint: string, height: number }} options With the height in CSS pixels. */
  constructor(view, options) {
    super(view, options);
    this.height = options.height;
    this.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": options.title });
    this.overlay = h("canvas", { class: "wb-overlay", "aria-hidden": "true" });
    this.holder = h("div", { class: "wb-canvas" }, this.canvas, this.overlay);
    this.body.append(this.holder);
    const [copy, save] = pictureButtons(this);
    this.tools.before(copy);
    this.tableButton.before(save);
    this.width = 0;
    this.canvas.addEventListener("pointermove", (event) => this.pointer(event));
    this.pointed = null; // the last event of a pointer that is over the picture
    this.canvas.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.view.tooltip.hide();
      this.cursor.setHover({});
    });
    this.canvas.addEventListener("click", (event) => {
      const hit = this.hit(event.offsetX, event.offsetY);
      const { inspector } = this.view, card = inspector?.pinned;
      if (hit) this.clicked(hit, event);
      const { offsetX, offsetY, clientX, clientY } = event, target = this.canvas;
      // A finger does not hover: its tap tells what a label has no room for, such as a long name, if no card does.
      const tells = event.pointerType === "touch" && inspector?.pinned === card;
      if (tells) this.tell({ offsetX, offsetY, clientX, clientY, target });
    });
  }

  needs(what) {
    return what !== "status" && what !== "grown" && what !== "pin";
  }

  /** Whether a change alters the picture; all others only alter the overlay. */
  changesPicture(what) {
    return what !== "hover";
  }

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
    if ([...stale].some((what) => this.changesPicture(what))) {
      this.layout();
      const context = this.prepare(this.canvas);
      this.draw(context, this.width, this.height);
      this.canvas.setAttribute("aria-label", `${this.title}: ${this.describe()}`);
    }
    // An overlay that is empty and stays empty is left alone: even clearing a canvas makes the browser present it.
    const shows = this.showsOverlay();
    if (shows || this.overlayShown) this.drawOverlay(this.prepare(this.overlay), this.width, this.height);
    this.overlayShown = shows;
  }

  frame(settled = false) {
    const moved = this.pointed && [...this.stale].some((what) => this.changesPicture(what));
    super.frame(settled);
    if (moved && this.view.tooltip.about === this.canvas) this.tell(this.pointed);
  }

  /** Whether there is anything to draw above the picture. */
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
      this.holder.style.height = `${this.height}px`;
    }
    // Not only with its size: an overlay of constant width moves when the panel becomes wider.
    if (canvas.style.left !== `${left}px`) canvas.style.left = `${left}px`;
    return clearedContext(canvas, left, this.width - left, this.height);
  }

  pointer(event) {
    const { offsetX, offsetY, clientX, clientY, buttons } = event;
    this.pointed = { offsetX, offsetY, clientX, clientY, buttons, target: this.canvas };
    this.cursor.setHover(this.tell(this.pointed)?.hover || {});
  }

  /** Show the tooltip of what is under the pointer now, which another picture may have in its place; returns it. */
  tell(pointed) {
    const hit = this.hit(pointed.offsetX, pointed.offsetY);
    if (hit?.lines) this.view.tooltip.show(pointed, hit.lines);
    else this.view.tooltip.hide();
    return hit;
  }

  /** Compute everything that depends on the data and the width, before the picture is drawn. */
  layout() {}

  draw(_context, _width, _height) {}

  drawOverlay(_context, _width, _height) {}

  /**
   * The object under a point, or null.
   * @returns {{ hover?: any, lines?: string[], step?: number, request?: any } | null}
   */
  hit(_x, _y) {
    return null;
  }

  clicked(hit, _event) {
    if (hit.step !== undefined) this.cursor.seek(hit.step);
  }

  /** A short text for the label of the canvas. */
  describe() {
    return "";
  }
}

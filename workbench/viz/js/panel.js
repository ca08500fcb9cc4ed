// What all panels have in common: a titled section with a table twin, and for drawn panels two canvases, one for
// what changes with the data and one above it for the cursor and the hover, so that moving them repaints little.

import { h, replace, table } from "./dom.js";

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const SMALL = '10px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const BOLD = '600 11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const MONO = '10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace';

/** Left and right margins of the panels that share the step axis, so that a step stands at the same x in all. */
export const MARGIN = { left: 84, right: 176 };

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

/** The context of a canvas that shows a panel from `left` on: empty, and in the panel's own coordinates. */
export function clearedContext(canvas, left, width, height) {
  const ratio = globalThis.devicePixelRatio || 1, context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, -left * ratio, 0);
  context.clearRect(left, 0, width, height);
  context.font = context.fontInUse = FONT;
  context.textBaseline = "middle";
  return context;
}

/** The shared horizontal axis of steps (or of time): pixels of a step, and the step at a pixel. */
export class StepAxis {
  constructor(store, cursor, width, margin = MARGIN) {
    this.store = store;
    [this.from, this.to] = cursor.range;
    this.x0 = margin.left;
    this.x1 = width - margin.right;
    this.byTime = cursor.axis === "time" && store.timed();
    if (this.byTime) {
      const last = Math.min(store.numSteps, Math.ceil(this.to)) - 1;
      this.t0 = store.value("time", Math.max(0, Math.floor(this.from)));
      this.t1 = Math.max(store.endTime.data[Math.max(0, last)], this.t0 + 1e-9);
    }
  }
  get stepWidth() { return (this.x1 - this.x0) / (this.to - this.from); }
  x(step) {
    if (!this.byTime) return this.x0 + (step - this.from) * this.stepWidth;
    const n = this.store.numSteps;
    const t = step < n ? this.store.value("time", Math.max(0, step)) : this.store.endTime.data[n - 1];
    return this.x0 + ((t - this.t0) / (this.t1 - this.t0)) * (this.x1 - this.x0);
  }
  /** Right edge of a step's mark. */
  end(step) {
    if (!this.byTime) return this.x(step + 1);
    return this.x0 + ((this.store.endTime.data[step] - this.t0) / (this.t1 - this.t0)) * (this.x1 - this.x0);
  }
  stepAt(x) {
    if (x < this.x0 - 4 || x > this.x1 + 4) return -1;
    const n = this.store.numSteps;
    let step;
    if (this.byTime) {
      const t = this.t0 + ((x - this.x0) / (this.x1 - this.x0)) * (this.t1 - this.t0);
      let low = 0, high = n;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.store.value("time", middle) <= t) low = middle + 1; else high = middle;
      }
      step = low - 1;
    } else {
      step = Math.floor(this.from + (x - this.x0) / this.stepWidth);
    }
    return step >= 0 && step < n ? step : -1;
  }
  get first() { return Math.max(0, Math.floor(this.from)); }
  get last() { return Math.min(this.store.numSteps, Math.ceil(this.to)); }
}

/** Round tick values for a range, at most `count` of them. */
export function ticks(from, to, count, whole = false) {
  const raw = (to - from) / Math.max(1, count);
  if (!(raw > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(raw));
  let size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  if (whole) size = Math.max(1, Math.round(size));
  const result = [];
  for (let v = Math.ceil(from / size) * size; v <= to + size * 1e-9; v += size) result.push(Number(v.toPrecision(12)));
  return result;
}

const patterns = new Map();

/** Fill a rectangle with diagonal lines: recomputed tokens, unused budget, evictable blocks. */
export function hatch(context, x, y, width, height, colour, spacing = 5) {
  if (width <= 0 || height <= 0) return;
  const ratio = globalThis.devicePixelRatio || 1, key = `${colour} ${spacing} ${ratio}`;
  if (!patterns.has(key)) {
    if (patterns.size > 200) patterns.clear();
    const size = Math.round(spacing * ratio), tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const draw = tile.getContext("2d");
    draw.strokeStyle = colour;
    draw.lineWidth = ratio;
    // Three lines, so that the corners of neighbouring tiles join.
    for (const shift of [-size, 0, size]) {
      draw.moveTo(shift - 1, size + 1);
      draw.lineTo(shift + size + 1, -1);
    }
    draw.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(spacing / size));
    patterns.set(key, pattern);
  }
  context.fillStyle = patterns.get(key);
  context.fillRect(x, y, width, height);
}

/** A horizontal dashed line, one pixel high. A pattern, because stroking hundreds of dashes is dear. */
export function dashes(context, x, y, width, colour, on, off) {
  if (width <= 0) return;
  const ratio = globalThis.devicePixelRatio || 1, key = `dashes ${colour} ${on} ${off} ${ratio}`;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = Math.round((on + off) * ratio);
    tile.height = 1;
    const draw = tile.getContext("2d");
    draw.fillStyle = colour;
    draw.fillRect(0, 0, Math.round(on * ratio), 1);
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale((on + off) / tile.width, 1));
    patterns.set(key, pattern);
  }
  context.fillStyle = patterns.get(key);
  context.fillRect(x, y, width, 1);
}

/** The mark of an event, centred on a point. */
export function eventMark(context, theme, kind, x, y, size = 4) {
  const { shape, colour } = theme.event(kind);
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  if (shape === "up") { context.moveTo(x, y - size); context.lineTo(x + size, y + size); context.lineTo(x - size, y + size); }
  if (shape === "down") { context.moveTo(x, y + size); context.lineTo(x + size, y - size); context.lineTo(x - size, y - size); }
  if (shape === "half") context.arc(x, y, size, Math.PI / 2, -Math.PI / 2);
  if (shape === "square") context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
  if (shape === "bar") context.rect(x - 0.75, y - size, 1.5, size * 2);
  if (shape === "cross") {
    context.moveTo(x - size, y - size); context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size); context.lineTo(x - size, y + size);
    return context.stroke();
  }
  context.closePath();
  context.fill();
}

/** Set the font only when it changes: parsing it is dear where a panel writes hundreds of labels. */
function setFont(context, font) {
  if (context.fontInUse === font) return;
  context.font = context.fontInUse = font;
}

export function text(context, string, x, y, colour, { align = "left", font = FONT } = {}) {
  setFont(context, font);
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(string, x, y);
}

const widths = new Map();

/** Width of a text in pixels, remembered; every digit counts as a 0, because counters never end. */
export function textWidth(context, string, font) {
  const sample = string.replace(/\d/g, "0"), key = font + sample;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size > 5000) widths.clear();
    setFont(context, font);
    widths.set(key, (width = context.measureText(sample).width));
  }
  return width;
}

/** A request id, right-aligned, with the square of its hue before it when it is in focus. */
export function requestLabel(context, id, x, y, colour, hue) {
  text(context, id, x, y, colour, { align: "right", font: MONO });
  if (!hue) return;
  context.fillStyle = hue;
  context.fillRect(x - textWidth(context, id, MONO) - 12, y - 3.5, 7, 7);
}

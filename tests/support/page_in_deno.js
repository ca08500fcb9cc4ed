// A page without a browser, for tests of the views' code: elements that keep what is set, and canvases that note what is
// painted. Reads a line of JSON from stdin, evaluates its code, and writes its value as a line of JSON.

const CHARACTER = 6; // the width of every character in pixels

// -- elements ----------------------------------------------------------------------------------------------------

class Text {
  nodeType = 3;
  constructor(text) {
    this.textContent = text;
  }
  remove() {
    this.parentElement?.drop(this);
  }
}

const hyphens = (name) => `data-${name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`;

class Element {
  nodeType = 1;
  childNodes = [];
  attributes = {};
  listeners = {};
  parentElement = null;
  hidden = false;
  disabled = false;
  scrollTop = 0;
  offsetParent = {};
  style = { setProperty: (name, value) => this.style[name] = value };

  constructor(tag) {
    this.tagName = tag.toUpperCase();
    this.dataset = new Proxy({}, {
      get: (_, name) => this.attributes[hyphens(name)],
      set: (_, name, value) => {
        this.attributes[hyphens(name)] = String(value);
        return true;
      },
    });
  }
  get classList() {
    const names = () => (this.attributes.class ?? "").split(" ").filter(Boolean);
    const set = (list) => this.attributes.class = list.join(" ");
    return {
      contains: (name) => names().includes(name),
      add: (name) => set([...new Set([...names(), name])]),
      remove: (name) => set(names().filter((other) => other !== name)),
      toggle: (name, on = !names().includes(name)) =>
        set(on ? [...new Set([...names(), name])] : names().filter((other) => other !== name)),
    };
  }
  set className(names) {
    this.attributes.class = names;
  }
  get className() {
    return this.attributes.class ?? "";
  }
  set title(text) {
    this.attributes.title = text;
  }
  set onclick(listener) {
    this.addEventListener("click", listener);
  }
  set tabIndex(value) {
    this.attributes.tabindex = String(value);
  }
  get children() {
    return this.childNodes.filter((node) => node.nodeType === 1);
  }
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get lastElementChild() {
    return this.children.at(-1) ?? null;
  }
  get previousElementSibling() {
    const all = this.parentElement?.children ?? [];
    return all[all.indexOf(this) - 1] ?? null;
  }
  get textContent() {
    return this.childNodes.map((node) => node.textContent).join("");
  }
  set textContent(text) {
    for (const node of [...this.childNodes]) this.drop(node);
    if (text !== "") this.append(new Text(String(text)));
  }
  get options() {
    return this.querySelectorAll("option");
  }
  get value() {
    return this.own ?? this.options[0]?.attributes.value ?? this.attributes.value ?? "";
  }
  set value(value) {
    this.own = String(value);
    if (this.tagName === "OPTION") this.attributes.value = String(value);
  }
  get isConnected() {
    return true;
  }
  get clientWidth() {
    return page.width;
  }
  drop(node) {
    this.childNodes = this.childNodes.filter((other) => other !== node);
    node.parentElement = null;
  }
  insertBefore(node, before) {
    node.parentElement?.drop(node);
    const at = before ? this.childNodes.indexOf(before) : this.childNodes.length;
    this.childNodes.splice(at, 0, node);
    node.parentElement = this;
  }
  append(...nodes) {
    for (const node of nodes) this.insertBefore(node?.nodeType ? node : new Text(String(node)), null);
  }
  appendChild(node) {
    this.append(node);
  }
  prepend(...nodes) {
    for (const node of nodes.reverse()) this.insertBefore(node, this.childNodes[0]);
  }
  before(node) {
    this.parentElement.insertBefore(node, this);
  }
  after(node) {
    this.parentElement.insertBefore(node, this.parentElement.childNodes[this.parentElement.childNodes.indexOf(this) + 1]);
  }
  replaceChildren(...nodes) {
    this.textContent = "";
    this.append(...nodes);
  }
  remove() {
    this.parentElement?.drop(this);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  hasAttribute(name) {
    return name in this.attributes;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  toggleAttribute(name, on) {
    if (on) this.attributes[name] = "";
    else delete this.attributes[name];
  }
  addEventListener(name, listener) {
    (this.listeners[name] ??= []).push(listener);
  }
  removeEventListener() {}
  /** Call the listeners of an element and of those around it, as for an event. */
  fire(name, values = {}) {
    const event = { target: this, preventDefault() {}, stopPropagation() {}, detail: 1, ...values };
    for (let at = this; at; at = at.parentElement) for (const listener of at.listeners[name] ?? []) listener(event);
  }
  click() {
    this.fire("click");
  }
  matches(selector) {
    return selector.split(",").some((one) => matchesOne(this, one.trim()));
  }
  closest(selector) {
    for (let at = this; at; at = at.parentElement) if (at.matches(selector)) return at;
    return null;
  }
  contains(other) {
    for (let at = other; at; at = at.parentElement) if (at === this) return true;
    return false;
  }
  querySelectorAll(selector) {
    return this.children.flatMap((child) => [...(child.matches(selector) ? [child] : []), ...child.querySelectorAll(selector)]);
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  getRootNode() {
    return { activeElement: null, elementFromPoint: () => null };
  }
  getBoundingClientRect() {
    return { x: 0, y: 0, left: 0, top: 0, right: page.width, bottom: 0, width: page.width, height: 0 };
  }
  toJSON() {
    return {};
  }
  focus() {}
  blur() {}
  scrollIntoView() {}
  setPointerCapture() {}
  attachShadow() {
    return this;
  }
}

function matchesOne(element, selector) {
  const parts = selector.split(/\s+/), last = parts.pop();
  const tag = last.match(/^[a-z0-9]+/i)?.[0];
  if (tag && element.tagName !== tag.toUpperCase()) return false;
  for (const [, name] of last.matchAll(/\.([\w-]+)/g)) if (!element.classList.contains(name)) return false;
  for (const [, name, , value] of last.matchAll(/\[([\w-]+)(=["']?([^\]"']*)["']?)?\]/g)) {
    if (!(name in element.attributes) || (value !== undefined && element.attributes[name] !== value)) return false;
  }
  if (!parts.length) return true;
  for (let at = element.parentElement; at; at = at.parentElement) if (matchesOne(at, parts.join(" "))) return true;
  return false;
}

// -- canvases ----------------------------------------------------------------------------------------------------

class Context {
  constructor(canvas) {
    this.canvas = canvas;
    this.marks = [];
    this.path = [];
    this.saved = [];
    Object.assign(this, { fillStyle: "#000000", strokeStyle: "#000000", lineWidth: 1, font: "", textAlign: "left" });
    this.clearing = false;
    this.move = [0, 0];
  }
  mark(what, colour, ...place) {
    const moved = [...place];
    if (typeof moved[0] === "number") [moved[0], moved[1]] = [moved[0] + this.move[0], moved[1] + this.move[1]];
    this.marks.push([what, String(colour?.words ?? colour), ...moved]);
  }
  setTransform() {}
  scale() {}
  translate(x, y) {
    this.move = [this.move[0] + x, this.move[1] + y];
  }
  save() {
    this.saved.push([this.move]);
  }
  restore() {
    [this.move] = this.saved.pop();
  }
  clip() {}
  clearRect(x, y, width, height) {
    if (!this.clearing) this.marks = this.marks.filter(([, , left]) => left < x || left >= x + width);
    if (x === 0 && width >= page.width) this.marks = [];
    void [y, height];
  }
  fillRect(x, y, width, height) {
    this.mark("rect", this.fillStyle, x, y, width, height);
  }
  strokeRect(x, y, width, height) {
    this.mark("frame", this.strokeStyle, x, y, width, height);
  }
  fillText(words, x, y) {
    this.mark("text", this.fillStyle, x, y, words, this.textAlign);
  }
  strokeText() {}
  setLineDash(dash) {
    this.dash = dash;
  }
  beginPath() {
    this.path = [];
  }
  closePath() {}
  moveTo(x, y) {
    this.path.push([x + this.move[0], y + this.move[1]]);
  }
  lineTo(x, y) {
    this.moveTo(x, y);
  }
  rect(x, y, width, height) {
    this.path.push(["rect", x + this.move[0], y + this.move[1], width, height]);
  }
  arc(x, y, radius) {
    this.path.push(["arc", x + this.move[0], y + this.move[1], radius]);
  }
  fill() {
    this.marks.push(["filled", String(this.fillStyle), ...this.path]);
  }
  stroke() {
    this.marks.push(["stroked", String(this.strokeStyle), ...this.path]);
  }
  measureText(words) {
    return { width: CHARACTER * words.length };
  }
  createPattern(tile) {
    const { marks } = tile.getContext("2d"), colours = marks.map(([what, colour]) => `${what} ${colour}`);
    return { words: `pattern of ${[...new Set(colours)].join(", ")}`, setTransform() {} };
  }
  createImageData(width, height) {
    return { data: new Uint8ClampedArray(4 * width * height) };
  }
  putImageData(pixels) {
    this.canvas.pixels = pixels;
  }
  drawImage(image, ...place) {
    this.marks.push(["image", "", ...place, image.pixels ? [...image.pixels.data] : null]);
  }
}

class Canvas extends Element {
  width = 300;
  height = 150;
  getContext() {
    return (this.context ??= new Context(this));
  }
}

// -- the page ----------------------------------------------------------------------------------------------------

const page = { width: 1200, frames: [], now: 0 };
const observer = class {
  observe() {}
  disconnect() {}
};
Object.assign(globalThis, {
  document: Object.assign(new Element("document"), {
    body: new Element("body"),
    documentElement: new Element("html"),
    createElement: (tag) => new (tag === "canvas" ? Canvas : Element)(tag),
    createTextNode: (text) => new Text(text),
  }),
  ResizeObserver: observer,
  IntersectionObserver: observer,
  MutationObserver: observer,
  DOMMatrix: class {
    scale() {}
  },
  matchMedia: () => ({ matches: false, addEventListener() {}, removeEventListener() {} }),
  requestAnimationFrame: (frame) => page.frames.push(frame),
  cancelAnimationFrame() {},
  devicePixelRatio: 1,
  innerWidth: 1200,
  innerHeight: 900,
  setTimeout: () => 0,
  clearTimeout() {},
  scrollTo() {},
});
Object.defineProperty(globalThis, "location", {
  value: { hash: "", href: "http://192.0.2.7/", origin: "http://192.0.2.7", pathname: "/" },
  writable: true,
});
Object.defineProperty(globalThis, "history", { value: { replaceState() {} }, writable: true });

/** Draw what waits for a frame. A film or run that plays asks for frames until its time is over: stop it before. */
page.frame = () => {
  for (let drawn = 0; page.frames.length; drawn++) {
    if (drawn === 1000) throw new Error("every frame asks for another: stop what is playing");
    page.frames.shift()(page.now);
  }
};

const fromBase64 = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

/** Open a view of packets, with the `render` of the joined module. */
page.bytes = fromBase64;

page.open = ({ packet, other, status = { live: false }, options = {}, width = 1200, cursor = {} }) => {
  Object.assign(page, { width, frames: [] });
  page.values = { status, options, cursor, packet: fromBase64(packet), other: other && fromBase64(other) };
  page.sent = [];
  page.told = []; // the places that the host gets, as names and values
  page.listeners = {};
  const model = {
    get: (name) => page.values[name],
    set(name, value) {
      if (name === "command") page.sent.push(value);
      if (name === "cursor" || name === "step") page.told.push([name, value]);
    },
    save_changes() {},
    on: (name, listener) => page.listeners[name] = listener,
    off() {},
  };
  const el = new Element("main");
  page.module.render({ model, el });
  page.root = el.children[0];
  page.view = page.root.workbench;
  for (const panel of page.view.panels) panel.resized();
  page.frame();
};

/** Everything that a panel paints for the step at the cursor. */
page.painted = (name) => {
  const panel = page.view.panel(name);
  for (const canvas of [panel.canvas, panel.overlay]) canvas.getContext("2d").marks = [];
  panel.picture = null;
  panel.stale = new Set(["data"]);
  panel.visible = true;
  panel.frame();
  return { marks: panel.canvas.getContext("2d").marks, over: panel.overlay.getContext("2d").marks };
};

/** The cells of a panel's table. */
page.table = (name) => {
  const { headings, rows, caption } = page.view.panel(name).tableData();
  return { headings, caption, rows: rows.map((row) => row.cells ?? row) };
};

/** The facts of a drawer as pairs of texts. */
page.facts = (rows) => {
  const words = (part) => Array.isArray(part) ? part.map(words).join("") : String(part?.words ?? part?.textContent ?? part);
  return rows.map(([name, parts]) => [name, words(parts)]);
};

globalThis.page = page;
const numbers = (_, value) =>
  typeof value === "number" && !Number.isFinite(value) ? String(value) : ArrayBuffer.isView(value) ? [...value] : value;

let waiting = "";
for await (const part of Deno.stdin.readable.pipeThrough(new TextDecoderStream())) {
  waiting += part;
  for (let end = waiting.indexOf("\n"); end >= 0; end = waiting.indexOf("\n")) {
    const { code, argument, module } = JSON.parse(waiting.slice(0, end));
    waiting = waiting.slice(end + 1);
    let answer;
    try {
      if (module) page.module = await import(`data:text/javascript;base64,${module}`);
      else answer = await new Function("argument", "page", "view", `return ${code}`)(argument, page, page.view);
      answer = { value: answer ?? null };
    } catch (problem) {
      answer = { problem: problem.stack ?? String(problem) };
    }
    console.log(JSON.stringify(answer, numbers));
  }
}

// Small helpers to build the page. Text from a trace only ever becomes a text node: nothing here parses HTML.

/** Create an element: h("button", { class: "wb-button", onclick: f, "aria-label": "Run" }, "Run"). */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") element[name] = value;
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child.nodeType ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.textContent = "";
  append(element, children);
}

/** Set text only when it differs, so that a page that stands still is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table with a header row; cells are text. Rows may carry a click handler. */
export function table(headings, rows, { caption, onclick } = {}) {
  const body = h("tbody");
  for (const row of rows) {
    const tr = h("tr", onclick ? { tabindex: 0, onclick: () => onclick(row), onkeydown: (e) => e.key === "Enter" && onclick(row) } : {});
    for (const cell of row.cells || row) tr.append(h("td", typeof cell === "number" ? { class: "wb-number" } : {}, cell));
    body.append(tr);
  }
  return h("table", { class: "wb-table" }, caption && h("caption", {}, caption),
    h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))), body);
}

/** Keep at most `limit` characters of a text, with an ellipsis. */
export function shorten(text, limit) {
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

/** A text safe to draw on a canvas: no control, bidirectional-override or line-break characters, bounded length. */
export function plain(text, limit = 40) {
  return shorten(text.slice(0, limit * 4).replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, "·"), limit);
}

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function formatNumber(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1000 ? String(value) : grouped.format(value);
  return Math.abs(value) >= 1000 ? grouped.format(value) : String(Number(value.toPrecision(digits)));
}

/** Seconds in the unit that reads best. */
export function formatSeconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds >= 1) return `${formatNumber(seconds)} s`;
  if (seconds >= 1e-3) return `${formatNumber(seconds * 1e3)} ms`;
  return `${formatNumber(seconds * 1e6)} µs`;
}

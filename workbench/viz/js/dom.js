// Small helpers that build the page. Text from a trace only ever becomes a text node: nothing here parses HTML.

/** Names that `h` sets as properties of an element; all others become attributes. */
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden"]);

/** Create an element: h("button", { class: "wb-button", onclick: f, "aria-label": "Run" }, "Run"). */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value !== undefined && value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  append(element, children);
  return element;
}

/** Append elements and texts, in lists of any depth; null, undefined and false are left out. */
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

/** A drop-down list whose options are given as [value, text] pairs. */
export function select(label, options, onchange) {
  return h(
    "select",
    { class: "wb-button", "aria-label": label, onchange },
    options.map(([value, text]) => h("option", { value }, text)),
  );
}

/** The head of a table, with a cell for each heading. */
export function tableHead(headings) {
  return h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text))));
}

/** The content of the first cell of a row that reacts to clicks: a button, by which the keyboard has the row too. */
export function rowButton(...content) {
  return h("button", { class: "wb-link", type: "button" }, content);
}

/**
 * A table with a header row; cells are text.
 * @param {string[]} headings
 * @param {any[]} rows Lists of cells, or objects with such a list as `cells`.
 * @param {{ caption?: string, onclick?: (row: any) => void }} options With `onclick`, rows begin with a button.
 */
export function table(headings, rows, { caption, onclick } = {}) {
  const body = h("tbody");
  for (const row of rows) {
    const cells = (row.cells || row).map((cell, i) => {
      const props = typeof cell === "number" ? { class: "wb-number" } : {};
      return h("td", props, onclick && !i ? rowButton(cell) : cell);
    });
    body.append(h("tr", onclick ? { onclick: () => onclick(row) } : {}, cells));
  }
  return h("table", { class: "wb-table" }, caption && h("caption", {}, caption), tableHead(headings), body);
}

/** Keep at most `limit` characters of a text; an ellipsis stands for the rest. */
export function shorten(text, limit) {
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

/** Characters that could break a line or turn the direction of writing. */
const UNSAFE = /[\p{Cc}\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;

/** A text safe to draw on a canvas: no control, bidirectional-override or line-break characters, bounded length. */
export function plain(text, limit = 40) {
  return shorten(text.slice(0, limit * 4).replace(UNSAFE, "·"), limit);
}

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function formatNumber(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1000 ? String(value) : grouped.format(value);
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 1000 ? grouped.format(value) : String(rounded);
}

/** A number with its noun, such as "1 step" or "2,000 steps". */
export function counted(value, noun) {
  return `${formatNumber(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Half-open range of whole numbers, as "[from, to)". */
export function formatRange(from, to) {
  return `[${formatNumber(from)}, ${formatNumber(to)})`;
}

/**
 * The unit in which a duration of three digits reads best, and its length in seconds.
 * @returns {[string, number]}
 */
export function timeUnit(seconds) {
  const isShort = (unit) => Math.abs(Number((seconds / unit).toPrecision(3))) < 1000;
  return isShort(1e-6) ? ["µs", 1e-6] : isShort(1e-3) ? ["ms", 1e-3] : ["s", 1];
}

/** The median of sorted numbers: of an even number of them the mean of the two in the middle, as in Python. */
export function median(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** A duration in the unit that reads best; `duration` of workbench/base/text.py writes the same. */
export function formatSeconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  const [name, unit] = timeUnit(seconds);
  return `${formatNumber(seconds / unit)} ${name}`;
}

/** A time in text, one of many at a distance in seconds: with as many digits as tell it from its neighbours. */
function formatMoment(seconds, distance) {
  if (Math.abs(seconds) < distance * 1e-6) return "0 s";
  const [name, unit] = timeUnit(seconds), digits = Math.max(0, Math.ceil(-Math.log10(distance / unit) - 1e-6));
  const value = (seconds / unit).toLocaleString("en-US", { maximumFractionDigits: Math.min(digits, 12) });
  return `${value} ${name}`;
}

/** Whether a time of a run of this span is written in minutes. */
export const inMinutes = (time, span) => span >= 120 || (time >= 600 && span >= 8);

/**
 * A time of a run, as one of many at a distance: in seconds, or for a long run in minutes and seconds, with digits
 * after the point if the others are less than a second apart.
 */
export function timeWords(time, span, distance = 0) {
  if (!inMinutes(time, span)) return formatMoment(time, distance || span / 1000 || 1);
  const digits = distance > 0 && distance < 1 && Math.abs(time) >= distance * 1e-6
    ? Math.ceil(-Math.log10(distance) - 1e-6)
    : 0;
  const all = Number(time.toFixed(digits)), whole = Math.floor(all), pad = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60, rest = (all - whole).toFixed(digits);
  const seconds = `${pad(whole % 60)}${rest.slice(1)}`;
  return hours ? `${hours}:${pad(minutes)}:${seconds} h` : `${minutes}:${seconds} min`;
}

/** Name and content of what the host has made for this page: the name is the first line. */
export function downloaded(bytes) {
  const data = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength), end = data.indexOf(10);
  return { name: new TextDecoder().decode(data.slice(0, end)), content: data.slice(end + 1) };
}

/** Let the browser save a file. */
export function offerFile(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Mark a button as out of use, without disabling it: it keeps the focus, and a press says why. */
export function unusable(element, yes) {
  element.setAttribute("aria-disabled", String(yes));
}

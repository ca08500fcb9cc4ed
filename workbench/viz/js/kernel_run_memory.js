// One array of a recorded kernel: the touched elements, as rows of cells that light up since the last barrier.

import { h, replace, select, setText, table } from "./dom.js";
import { CellMarks, indices, latestAccess, position, touched, valueText } from "./kernel_run_marks.js";
import { paintCells } from "./kernel_run_paint.js";
import { itemsize, writes } from "./kernel_run_file.js";

const MAX_ROWS = 32, BANK_ROW_BYTES = 128, MAX_COLUMNS = 128;

export class MemoryPanel {
  constructor(view, array, number) {
    this.view = view;
    this.array = array;
    this.number = number;
    this.elements = touched(view.run, number);
    this.used = this.elements.length > 0;
    if (!this.used) return;
    this.columns = columnsOf(array);
    this.rows = [...new Set(Array.from(this.elements, (element) => Math.floor(element / this.columns)))];
    this.top = 0;
    this.marks = new CellMarks(view.run, number);
    this.canvas = h("canvas", { class: "wb-kr-cells", role: "img", tabindex: 0 });
    this.canvas.addEventListener("click", (event) => this.pick(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.told, ""));
    this.told = h("div", { class: "wb-hint wb-kr-told" });
    this.tableView = h("div", { class: "wb-table-view", tabindex: 0, hidden: true });
    const words = array.role === "threadgroup" ? "threadgroup memory, a row of 32 banks per line" : array.role;
    const shape = array.shape.join(" × ");
    this.element = h(
      "section",
      { class: "wb-panel", "aria-label": `Memory of ${array.name}` },
      h(
        "header",
        {},
        h("h3", {}, array.name),
        h("span", { class: "wb-hint" }, `${words}, ${array.dtype}${shape ? ` [${shape}]` : ""}`),
        this.chooser(),
      ),
      this.canvas,
      this.told,
      this.tableView,
    );
  }

  /** A list of the touched indices of the first axis, such as the blocks of a cache. */
  chooser() {
    const { shape } = this.array;
    if (shape.length < 2) return null;
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    const found = [...new Set(Array.from(this.elements, (element) => Math.floor(element / size)))];
    if (found.length < 2) return null;
    const options = [["", `choose of ${found.length}`], ...found.map((one) => [one, `${this.array.name}[${one}]`])];
    return select(`Part of ${this.array.name}`, options, (event) => {
      if (event.target.value === "") return;
      const one = Number(event.target.value);
      this.top = Math.max(0, this.rows.findIndex((row) => row * this.columns >= one * size));
      this.chosen = true;
      this.view.inspector.showCell(this.number, one * size, (one + 1) * size, `${this.array.name}[${one}]`);
      this.draw();
      this.chosen = false;
    });
  }

  draw() {
    const { view } = this, { cells: marks, changed } = this.marks.at(view.now);
    const { width } = view.room, look = `${width} ${view.theme.name} ${view.asTable}`;
    if (!changed && !this.chosen && this.look === look) return;
    this.look = look;
    this.follow(marks);
    const shown = this.rows.slice(this.top, this.top + MAX_ROWS);
    this.painted = paintCells(this.canvas, {
      rows: shown.map((row) => ({ row, label: this.label(row) })),
      columns: this.columns,
      num: this.array.num_bytes / itemsize(this.array.dtype),
      marks,
      theme: view.theme,
      width,
      more: this.rows.length > shown.length
        ? `rows ${this.top + 1} to ${this.top + shown.length} of ${this.rows.length}`
        : "",
    });
    const lit = [...marks].filter(([, cell]) => cell.now).length;
    this.canvas.setAttribute(
      "aria-label",
      `${this.array.name}: ${marks.size} elements touched since the barrier, ${lit} now`,
    );
    this.canvas.hidden = view.asTable;
    this.tableView.hidden = !view.asTable;
    if (view.asTable) replace(this.tableView, this.rowsOf(marks));
  }

  rowsOf(marks) {
    const rows = [...marks].sort(([a], [b]) => a - b).slice(0, 400).map(([element, cell]) => {
      return [this.name(element), cell.reads, cell.writes, cell.now];
    });
    return rows.length ? table(["element", "reads", "writes", "now"], rows) : "not touched since the last barrier";
  }

  /** Move the rows that are shown to those of the present instruction. */
  follow(marks) {
    if (this.chosen || this.rows.length <= MAX_ROWS) return;
    let first = Infinity;
    for (const [element, { now }] of marks) if (now) first = Math.min(first, Math.floor(element / this.columns));
    if (first === Infinity) return;
    const at = this.rows.indexOf(first);
    if (at >= 0 && (at < this.top || at >= this.top + MAX_ROWS)) this.top = Math.max(0, at - 4);
  }

  name(element) {
    return `${this.array.name}[${position(this.array, element)}]`;
  }

  label(row) {
    const { shape } = this.array, first = row * this.columns;
    return shape.length > 1 && this.columns === shape.at(-1)
      ? indices(shape, first).slice(0, -1).join(",")
      : String(first);
  }

  /** The row and column under the pointer, or null; column -1 is the label of the row. */
  under(event) {
    const box = this.canvas.getBoundingClientRect(), { left, cell, height } = this.painted;
    const row = this.rows[this.top + Math.floor((event.clientY - box.top) / height)];
    const column = Math.max(-1, Math.floor((event.clientX - box.left - left) / cell));
    return row === undefined || column >= this.columns ? null : { row, column };
  }

  /** Tell the value of the element under the pointer, and the access that it is known from. */
  hover(event) {
    const { run, now } = this.view, at = this.under(event);
    if (!at || at.column < 0) return setText(this.told, "");
    const element = at.row * this.columns + at.column, found = latestAccess(run, now, this.number, element);
    if (!found) return setText(this.told, `${this.name(element)}: not touched so far by this threadgroup`);
    const { file, line } = run.place(found.event), does = writes(run.columns.kind[found.event]) ? "stored" : "loaded";
    const value = found.value === null ? "" : ` = ${valueText([found.value])}`;
    const by = `${does} by thread ${run.columns.thread[found.event]} at ${file}:${line}`;
    setText(this.told, `${this.name(element)}${value}, last ${by}`);
  }

  pick(event) {
    const at = this.under(event);
    if (!at) return;
    const { row, column } = at, element = row * this.columns + Math.max(0, column), whole = column < 0;
    const to = whole ? element + this.columns : element + 1;
    this.view.inspector.showCell(
      this.number,
      element,
      to,
      whole ? `Row ${this.label(row)} of ${this.array.name}` : this.name(element),
    );
  }
}

/** Elements per row: the last axis, or 128 bytes: the banks of threadgroup memory, a line of a buffer. */
export function columnsOf({ role, shape, dtype, num_bytes: bytes }) {
  const last = shape.at(-1) || 1, size = itemsize(dtype);
  if (role !== "threadgroup" && shape.length > 1 && last > 1 && last <= MAX_COLUMNS) return last;
  return Math.min(BANK_ROW_BYTES / size, Math.max(1, bytes / size));
}

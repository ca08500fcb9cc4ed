// The threadgroups of a launch, and a panel that shows which of them are recorded.

import { counted, h } from "./dom.js";
import { gridCounts, gridMarks, gridRows, groupAt } from "./kernel_run_launch.js";
import { contextOf, LEFT, SMALL } from "./kernel_run_paint.js";

const GAP = 1;

function paint(canvas, grid, { marks, planes, theme, width }) {
  const { colours } = theme, { columns, cell, height, rows } = grid, gap = cell >= 4 ? GAP : 0;
  const context = contextOf(canvas, width, grid.bottom + (grid.left ? 16 : 1));
  context.font = SMALL;
  context.textAlign = "left";
  rows.forEach(({ y, z, top }, index) => {
    context.fillStyle = colours.muted;
    if (height >= 9 || index % 3 === 0) context.fillText(planes > 1 ? `y ${y}, z ${z}` : `y ${y}`, 0, top + height / 2);
    context.fillStyle = colours.hairline;
    if (gap) { for (let x = 0; x < columns; x++) context.fillRect(LEFT + x * cell, top, cell - gap, height - gap); }
    else context.fillRect(LEFT, top, columns * cell, height - 1);
    for (const { at, now } of marks) {
      if (at[1] !== y || at[2] !== z) continue;
      context.fillStyle = now ? colours.cursor : colours.muted;
      context.fillRect(LEFT + at[0] * cell, top, Math.max(2, cell - gap), height - 1);
    }
  });
  context.fillStyle = colours.muted;
  if (grid.left) context.fillText(`${counted(grid.left, "row")} of threadgroups more`, LEFT, grid.bottom + 8);
}

/** The grid with its recorded threadgroups; a click on one goes to its beginning. */
export class GridPanel {
  constructor(view, panel) {
    this.view = view;
    this.counts = gridCounts(view.run);
    this.canvas = h("canvas", { role: "img", class: "wb-kr-grid" });
    this.canvas.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const group = groupAt(
        this.grid,
        gridMarks(view.run, view.now),
        event.clientX - box.left - LEFT,
        event.clientY - box.top,
      );
      if (group !== null) view.toGroup(group);
    });
    const hint = h("span", { class: "wb-hint" }, "recorded threadgroups are filled; click one to go there");
    this.element = panel("Grid", hint, this.canvas);
    this.element.hidden = this.counts.every((count) => count === 1);
  }

  draw() {
    if (this.element.hidden) return;
    const { run, now, theme, room: { width } } = this.view;
    const marks = gridMarks(run, now), present = marks.find((mark) => mark.now);
    const key = `${present.group} ${width} ${theme.name}`;
    if (this.painted === key) return;
    this.painted = key;
    this.grid = gridRows(this.counts, marks, width - LEFT);
    paint(this.canvas, this.grid, { marks, planes: this.counts[2], theme, width });
    const recorded = marks.slice(0, 20).map(({ at }) => `(${at.join(", ")})`).join(", ");
    const place = present.at.join(", "), size = this.counts.join(" by ");
    const words = `Grid of ${size} threadgroups; recorded: ${recorded}; now (${place})`;
    this.canvas.setAttribute("aria-label", words);
  }
}

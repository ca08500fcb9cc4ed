// The panels of a view, and the areas of the page that hold them in each choice of panels, such as the story.

import { BlockTablesPanel } from "./block_tables.js";
import { ComparePanel } from "./compare.js";
import { EventsPanel } from "./events.js";
import { GanttPanel } from "./gantt.js";
import { IncidentPanel } from "./incident.js";
import { KernelPanel } from "./kernel.js";
import { MetricsPanel } from "./metrics.js";
import { PackedPanel } from "./packed.js";
import { PoolPanel } from "./pool.js";
import { RectanglePanel } from "./rectangle.js";
import { TextsPanel } from "./texts.js";
import { TimelinePanel } from "./timeline.js";
import { WeightsPanel } from "./weights.js";
import { h } from "./dom.js";

const PANELS = {
  timeline: TimelinePanel,
  gantt: GanttPanel,
  compare: ComparePanel,
  packed: PackedPanel,
  rectangle: RectanglePanel,
  weights: WeightsPanel,
  kernel: KernelPanel,
  texts: TextsPanel,
  pool: PoolPanel,
  tables: BlockTablesPanel,
  events: EventsPanel,
  metrics: MetricsPanel,
  incident: IncidentPanel,
};

/** The panels of each view, by the area they are in; "end" is the card at the end of a run. */
const LAYOUTS = {
  story: { wide: ["compare"], left: ["texts"], right: ["timeline", "gantt", "end", "pool"] },
  scheduler: {
    wide: ["timeline", "gantt", "compare"],
    left: ["tables", "events"],
    right: ["pool", "end"],
    bottom: ["metrics"],
  },
  kernel: {
    wide: ["timeline", "compare"],
    left: ["packed", "rectangle"],
    right: ["kernel", "weights", "tables", "end"],
  },
  all: {
    wide: ["timeline", "gantt", "compare"],
    left: ["packed", "rectangle", "weights", "texts"],
    right: ["pool", "tables", "kernel", "events", "end"],
    bottom: ["metrics"],
  },
  incident: { wide: ["incident", "timeline", "gantt", "compare"], left: ["events"], right: ["pool"] },
};

export function isLayout(name) {
  return Object.hasOwn(LAYOUTS, name);
}

/** New panels of a view: those that are named, or all. */
export function makePanels(view, names) {
  const chosen = names?.length ? names : Object.keys(PANELS);
  return chosen.filter((id) => PANELS[id]).map((id) => new PANELS[id](view));
}

/** The areas: one across the page, two columns below it, and one across the page again. */
export class Areas {
  constructor() {
    this.areas = {};
    for (const name of ["wide", "left", "right", "bottom"]) {
      this.areas[name] = h("div", { class: `wb-area wb-${name}` });
    }
    const { wide, left, right, bottom } = this.areas;
    this.elements = [wide, h("div", { class: "wb-columns" }, left, right), bottom];
  }

  /**
   * Put the panels of a layout into the areas.
   * @param {string} layout Name of the layout.
   * @param {(id: string) => HTMLElement | undefined} elementOf The element of a panel, if the view has it.
   */
  fill(layout, elementOf) {
    for (const [area, element] of Object.entries(this.areas)) {
      const panels = (LAYOUTS[layout][area] || []).map(elementOf).filter(Boolean);
      for (const child of [...element.children]) if (!panels.includes(child)) child.remove();
      panels.forEach((panel, i) => {
        if (element.children[i] !== panel) element.insertBefore(panel, element.children[i] || null);
      });
      element.hidden = !panels.length;
    }
  }
}

// The page of a recorded kernel: its source, the lanes, memory and watched values at a moment, and a slider over time.
// Like the dashboard it speaks to its host through a model with get and on.

import { h, replace, select, setText, table } from "./dom.js";
import { KernelRun, KIND, LANES } from "./kernel_run_file.js";
import {
  laneMarks,
  latestWatch,
  nextStop,
  numThreads,
  sentence,
  valueOrNothing,
  valueText,
  watchedMarks,
} from "./kernel_run_marks.js";
import { GridPanel } from "./kernel_run_grid.js";
import { Inspector } from "./kernel_run_inspector.js";
import { MemoryPanel } from "./kernel_run_memory.js";
import { paintLanes } from "./kernel_run_paint.js";
import { SourcePanel } from "./kernel_run_source.js";
import { STYLE } from "./style.js";
import { hideStill } from "./surroundings.js";
import { inkOn, Theme } from "./theme.js";

const WAYS = [
  ["instruction", "by instruction"],
  ["line", "by line"],
  ["again", "this line again"],
  ["tile", "by tile (turn of an outermost loop)"],
  ["simdgroup", "in this simdgroup"],
  ["barrier", "by barrier"],
  ["threadgroup", "by threadgroup"],
];
const PLAY_MS = 80;

class KernelView {
  constructor(run, options) {
    this.run = run;
    this.theme = new Theme(options.theme || "auto");
    this.now = run.header.fault?.event === null || !run.header.fault ? 0 : run.size - 1;
    this.way = "instruction";
    this.asTable = false;
    this.build(options);
  }

  build(options) {
    const { header } = this.run, { fault } = header;
    const button = (words, title, onclick) =>
      h("button", { class: "wb-button", type: "button", title, onclick }, words);
    this.slider = h("input", {
      type: "range",
      min: 0,
      max: Math.max(0, this.run.size - 1),
      value: this.now,
      "aria-label": "Moment",
      oninput: () => this.seek(Number(this.slider.value)),
    });
    this.playing = null;
    this.play = button("Play", "Play or pause (space)", () => this.toggle());
    this.words = h("div", { class: "wb-kr-now", role: "status" });
    this.where = h("span", { class: "wb-hint" });
    this.source = new SourcePanel(this);
    this.lanes = h("canvas", { class: "wb-kr-lanes", role: "img", tabindex: 0 });
    this.lanes.addEventListener("click", (event) => this.pickLane(event));
    this.laneTable = h("div", { class: "wb-table-view", tabindex: 0, hidden: true });
    this.watched = h("div", { class: "wb-kr-watched", tabindex: 0 });
    const counts = header.arrays.map((_, number) =>
      this.run.columns.array.reduce((sum, own) => sum + (own === number), 0)
    );
    // Threadgroup memory first, shapes last, and what is used most before the rest.
    const rank = ({ array, number }) =>
      counts[number] + 1e12 * (Number(array.role === "threadgroup") - Number(array.role === "shape"));
    this.memory = header.arrays.map((array, number) => new MemoryPanel(this, array, number))
      .filter((panel) => panel.used)
      .sort((one, other) => rank(other) - rank(one));
    const panel = (title, hint, ...children) =>
      h("section", { class: "wb-panel", "aria-label": title }, h("header", {}, h("h3", {}, title), hint), ...children);
    this.inspector = new Inspector(this, panel);
    this.grid = new GridPanel(this, panel);
    const tableButton = h("button", { class: "wb-quiet", type: "button", "aria-pressed": "false" }, "Table");
    tableButton.addEventListener("click", () => {
      this.asTable = !this.asTable;
      tableButton.setAttribute("aria-pressed", String(this.asTable));
      this.draw();
    });
    const legend = h("span", { class: "wb-kr-legend" });
    this.legend = legend;
    const groups = header.threadgroups.map((at, group) => [group, `threadgroup (${at.join(", ")})`]);
    const chooseGroup = groups.length > 1 &&
      select("Threadgroup", groups, (event) => this.toGroup(Number(event.target.value)));
    this.groupChoice = chooseGroup;
    const left = header.num_left_out ? `, ${header.num_left_out.toLocaleString("en-US")} later events left out` : "";
    const faultButton = fault && h(
      "button",
      { class: "wb-button wb-kr-fault", type: "button", onclick: () => this.inspector.showFault() },
      `Fault: ${fault.kind}${fault.line ? ` at ${fault.file}:${fault.line}` : ""}`,
    );
    this.element = h(
      "div",
      { class: `wb-root wb-kr${options.page ? " wb-page" : ""}`, tabindex: -1 },
      h(
        "div",
        { class: "wb-kr-head" },
        h("h2", {}, `Kernel ${header.kernel}`),
        h(
          "span",
          { class: "wb-hint" },
          `grid (${header.grid.join(", ")}), threadgroups of (${header.threadgroup.join(", ")}) threads; recorded: ` +
            `${header.threadgroups.length} of ${header.num_threadgroups}, ` +
            `${this.run.numEvents.toLocaleString("en-US")} events${left}`,
        ),
        header.about && h("span", {}, header.about),
        faultButton,
      ),
      h(
        "div",
        { class: "wb-kr-bar" },
        button("|◀", "To the beginning (Home)", () => this.seek(0)),
        button("◀", "Back (left arrow)", () => this.move(-1)),
        this.play,
        button("▶", "On (right arrow)", () => this.move(1)),
        button("▶|", "To the end (End)", () => this.seek(this.run.size - 1)),
        select("Way of stepping", WAYS, (event) => this.way = event.target.value),
        chooseGroup,
        this.slider,
        this.where,
      ),
      this.words,
      h(
        "div",
        { class: "wb-kr-columns" },
        panel(
          "Source",
          h("span", { class: "wb-hint" }, "events per line; click a line to go there"),
          this.source.sourceTabs,
          this.source.calls,
          this.source.source,
        ),
        h(
          "div",
          { class: "wb-kr-right" },
          panel("Lanes", [legend, tableButton], this.lanes, this.laneTable),
          this.watchedPanel = panel("Watched values", null, this.watched),
          this.inspector.element,
          this.grid.element,
          this.memory.map((one) => one.element),
          panel("Numbers", h("span", { class: "wb-hint" }, "counts, none of them a time on a GPU"), this.numbers()),
        ),
      ),
    );
    this.element.workbench = this;
    this.watchedPanel.hidden = !this.run.columns.kind.includes(KIND.WATCH);
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  numbers() {
    const short = (value) => value === null ? "" : Number(value.toPrecision(4)).toLocaleString("en-US");
    const rows = this.run.header.numbers.map((
      one,
    ) => [one.array, one.name, short(one.value), short(one.best), one.definition]);
    return h(
      "div",
      { class: "wb-kr-numbers", tabindex: 0 },
      table(["array", "number", "value", "at best", "definition"], rows),
    );
  }

  key(event) {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => this.move(-1),
      ArrowRight: () => this.move(1),
      Home: () => this.seek(0),
      End: () => this.seek(this.run.size - 1),
      " ": () => this.toggle(),
    }[event.key];
    if (!act || (event.key === " " && event.target.matches("button"))) return;
    event.preventDefault();
    act();
  }

  toggle() {
    if (this.playing) {
      clearInterval(this.playing);
      this.playing = null;
    } else {
      if (this.now === this.run.size - 1) this.seek(0);
      this.playing = setInterval(() => {
        this.move(1);
        if (this.now === this.run.size - 1) this.toggle();
      }, PLAY_MS);
    }
    setText(this.play, this.playing ? "Pause" : "Play");
  }

  move(direction) {
    this.seek(nextStop(this.run, this.now, this.way, direction, this.source.depth));
  }

  seek(moment) {
    this.now = Math.max(0, Math.min(this.run.size - 1, moment));
    this.draw();
  }

  toGroup(group) {
    for (let i = 0; i < this.run.size; i++) {
      if (this.run.columns.group[this.run.first(i)] === group) return this.seek(i);
    }
  }

  /** Draw in the next frame. */
  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.drawNow();
    });
  }

  drawNow() {
    const { run, now } = this;
    if (!run.size) return setText(this.words, "Nothing was recorded.");
    // Sizes are read before anything changes: reading them afterwards would lay out the page once more.
    const { scrollTop, clientHeight: height } = this.source.source;
    this.room = { scrollTop, height, width: this.lanes.parentElement.clientWidth - 24 };
    this.theme.applyTo(this.element);
    this.slider.value = now;
    const event = run.first(now), place = run.place(event), at = run.header.threadgroups[run.columns.group[event]];
    setText(this.where, `instruction ${(now + 1).toLocaleString("en-US")} of ${run.size.toLocaleString("en-US")}`);
    const line = place.line ? ` — ${place.file}:${place.line}` : "";
    setText(this.words, `Threadgroup (${at.join(", ")}) · ${sentence(run, now)}${line}`);
    if (this.groupChoice) this.groupChoice.value = run.columns.group[event];
    this.source.draw(event);
    const marks = laneMarks(run, now);
    this.painted = paintLanes(this.lanes, marks, this.theme, this.room.width);
    this.drawLegend(marks);
    this.lanes.setAttribute("aria-label", `${marks.length} lanes: ${sentence(run, now)}`);
    this.lanes.hidden = this.asTable;
    this.laneTable.hidden = !this.asTable;
    if (this.asTable) replace(this.laneTable, this.laneRows(marks));
    if (!this.watchedPanel.hidden) this.drawWatched();
    this.grid.draw();
    for (const panel of this.memory) panel.draw();
  }

  drawLegend(marks) {
    const actions = [...new Set(marks.map((mark) => mark.action))].join("|");
    if (this.legendFor === actions + this.theme.name) return;
    this.legendFor = actions + this.theme.name;
    replace(
      this.legend,
      actions.split("|").map((action) => {
        const { colour, letter, words } = this.theme.action(action);
        return h("span", {}, h("i", { style: `background: ${colour}; color: ${inkOn(colour)}` }, letter), ` ${words}`);
      }),
    );
  }

  laneRows(marks) {
    const rows = marks.map(({ thread, simdgroup, lane, action, event }) => {
      const has = event >= 0 && this.run.arrayOf(event), [from] = has ? this.run.span(event) : [];
      const what = has ? `${has.name}[${from}]` : "";
      return [
        thread,
        simdgroup,
        lane,
        this.theme.action(action).words,
        what,
        event < 0 ? "" : valueOrNothing(this.run.valuesOf(event)),
      ];
    });
    return table(["thread", "simdgroup", "lane", "does", "element", "value"], rows);
  }

  drawWatched() {
    const { run, now } = this, event = run.first(now), simdgroup = run.columns.thread[event] >> 5;
    const shown = `${run.columns.group[event]} ${simdgroup} ${latestWatch(run, now)}`;
    if (this.watchedShown === shown) return;
    this.watchedShown = shown;
    const marks = watchedMarks(run, now), count = numThreads(run, event);
    const threads = Array.from(
      { length: Math.min(LANES, count - simdgroup * LANES) },
      (_, lane) => simdgroup * LANES + lane,
    );
    const rows = marks.map(({ name, values }) => [name, ...threads.map((t) => values[t] ? valueText(values[t]) : "")]);
    replace(this.watched, table([`simdgroup ${simdgroup}`, ...threads.map(String)], rows));
  }

  pickLane(event) {
    const box = this.lanes.getBoundingClientRect(), { size, height, columns } = this.painted;
    const column = Math.floor((event.clientX - box.left - this.painted.left) / size);
    const row = Math.floor((event.clientY - box.top) / height);
    if (column < 0 || column >= columns) return;
    this.inspector.showThread(row * columns + column);
  }
}

export const render = ({ model, el }) => {
  const style = h("style", {}, STYLE);
  const packet = model.get("packet"), options = model.get("options") || {};
  const view = new KernelView(new KernelRun(packet), options);
  el.append(style, view.element);
  const again = () => view.draw(), showStill = hideStill(model.get("still"));
  const sizes = new ResizeObserver(again);
  sizes.observe(view.element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", again);
  view.drawNow();
  if (view.run.header.fault) view.inspector.showFault();
  return () => {
    if (view.playing) view.toggle();
    sizes.disconnect();
    showStill();
    scheme.removeEventListener("change", again);
  };
};

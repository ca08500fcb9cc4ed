// The page of a recorded kernel: its source, the lanes, memory and watched values at a moment, and a slider over time.
// Like the dashboard it speaks to its host through a model with get and on.

import { h, replace, select, setText, table } from "./dom.js";
import { KernelRun, KIND, LANES } from "./kernel_run_file.js";
import {
  ends,
  eventsPerLine,
  laneMarks,
  nextStop,
  numThreads,
  sentence,
  valueText,
  watchedMarks,
} from "./kernel_run_marks.js";
import { MemoryPanel } from "./kernel_run_memory.js";
import { paintLanes } from "./kernel_run_paint.js";
import { STYLE } from "./style.js";
import { inkOn, Theme } from "./theme.js";

const WAYS = [
  ["instruction", "by instruction"],
  ["line", "by line"],
  ["again", "this line again"],
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
    this.file = "";
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
    this.sourceTabs = h("div", { class: "wb-kr-tabs", role: "tablist", "aria-label": "Texts of the kernel" });
    this.source = h("div", { class: "wb-kr-source", tabindex: 0, "aria-label": "Source" });
    this.lanes = h("canvas", { class: "wb-kr-lanes", role: "img", tabindex: 0 });
    this.lanes.addEventListener("click", (event) => this.pickLane(event));
    this.laneTable = h("div", { class: "wb-table-view", tabindex: 0, hidden: true });
    this.watched = h("div", { class: "wb-kr-watched", tabindex: 0 });
    this.inspector = h("div", { class: "wb-kr-inspector", "aria-live": "polite" });
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
      { class: "wb-button wb-kr-fault", type: "button", onclick: () => this.showFault() },
      `Fault: ${fault.kind}${fault.line ? ` at ${fault.file}:${fault.line}` : ""}`,
    );
    this.element = h(
      "div",
      { class: `wb-root wb-kr${options.page ? " wb-page" : ""}`, tabindex: -1 },
      h(
        "header",
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
          this.sourceTabs,
          this.source,
        ),
        h(
          "div",
          { class: "wb-kr-right" },
          panel("Lanes", [legend, tableButton], this.lanes, this.laneTable),
          this.watchedPanel = panel("Watched values", null, this.watched),
          this.inspectorPanel = panel("Who read it, who wrote it", null, this.inspector),
          this.memory.map((one) => one.element),
          panel("Numbers", h("span", { class: "wb-hint" }, "counts, none of them a time on a GPU"), this.numbers()),
        ),
      ),
    );
    this.element.workbench = this;
    this.watchedPanel.hidden = !this.run.columns.kind.includes(KIND.WATCH);
    this.inspectorPanel.hidden = true;
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
    this.seek(nextStop(this.run, this.now, this.way, direction));
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
    this.theme.applyTo(this.element);
    this.slider.value = now;
    const event = run.first(now), place = run.place(event), at = run.header.threadgroups[run.columns.group[event]];
    setText(this.where, `instruction ${(now + 1).toLocaleString("en-US")} of ${run.size.toLocaleString("en-US")}`);
    const line = place.line ? ` — ${place.file}:${place.line}` : "";
    setText(this.words, `Threadgroup (${at.join(", ")}) · ${sentence(run, now)}${line}`);
    if (this.groupChoice) this.groupChoice.value = run.columns.group[event];
    this.drawSource(place);
    const marks = laneMarks(run, now), width = this.lanes.parentElement.clientWidth;
    this.painted = paintLanes(this.lanes, marks, this.theme, width - 24);
    this.drawLegend(marks);
    this.lanes.setAttribute("aria-label", `${marks.length} lanes: ${sentence(run, now)}`);
    this.lanes.hidden = this.asTable;
    this.laneTable.hidden = !this.asTable;
    if (this.asTable) replace(this.laneTable, this.laneRows(marks));
    if (!this.watchedPanel.hidden) this.drawWatched();
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
        event < 0 ? "" : valueText2(this.run.valuesOf(event)),
      ];
    });
    return table(["thread", "simdgroup", "lane", "does", "element", "value"], rows);
  }

  drawSource(place) {
    const { texts } = this.run.header, files = Object.keys(texts).filter((file) => texts[file]);
    if (texts[place.file] !== undefined && place.line && this.follows !== false) this.file = place.file;
    if (!this.file) [this.file] = files;
    if (this.shownFile !== this.file) {
      this.shownFile = this.file;
      replace(
        this.sourceTabs,
        files.map((file) =>
          h("button", {
            class: "wb-quiet",
            type: "button",
            role: "tab",
            "aria-selected": String(file === this.file),
            onclick: () => this.showFile(file),
          }, file)
        ),
      );
      const counts = eventsPerLine(this.run, this.file), most = Math.max(1, ...counts.values());
      this.lines = texts[this.file].split("\n").map((text, index) => {
        const count = counts.get(index + 1) || 0, share = Math.round(100 * Math.sqrt(count / most));
        const props = { class: "wb-kr-line", style: `--share: ${share}%`, "data-line": index + 1 };
        return h(
          "div",
          count ? { ...props, class: "wb-kr-line wb-kr-used", onclick: () => this.toLine(index + 1) } : props,
          h("span", { class: "wb-kr-number" }, String(index + 1)),
          h("span", { class: "wb-kr-count", title: `${count} events` }, count ? compact(count) : ""),
          h("code", {}, text || " "),
        );
      });
      replace(this.source, this.lines);
      this.currentLine = null;
    }
    const line = place.file === this.file ? this.lines[place.line - 1] : null;
    if (line === this.currentLine) return;
    this.currentLine?.classList.remove("wb-kr-current");
    this.currentLine = line;
    if (!line) return;
    line.classList.add("wb-kr-current");
    const { offsetTop, offsetHeight } = line, { scrollTop, clientHeight } = this.source;
    if (offsetTop < scrollTop || offsetTop + offsetHeight > scrollTop + clientHeight) {
      this.source.scrollTop = offsetTop - clientHeight / 3;
    }
  }

  showFile(file) {
    this.file = file;
    this.follows = false;
    this.drawNow();
    this.follows = true;
  }

  /** The next instruction at a line, or the first one. */
  toLine(line) {
    const { run, file } = this;
    const at = (i) => run.place(run.first(i)).file === file && run.place(run.first(i)).line === line;
    for (let i = this.now + 1; i < run.size; i++) if (at(i)) return this.seek(i);
    for (let i = 0; i < run.size; i++) if (at(i)) return this.seek(i);
  }

  drawWatched() {
    const marks = watchedMarks(this.run, this.now), count = numThreads(this.run, this.run.first(this.now));
    const simdgroup = this.run.columns.thread[this.run.first(this.now)] >> 5;
    const threads = Array.from(
      { length: Math.min(LANES, count - simdgroup * LANES) },
      (_, lane) => simdgroup * LANES + lane,
    );
    const rows = marks.map(({ name, values }) => [name, ...threads.map((t) => values[t] ? valueText(values[t]) : "")]);
    replace(this.watched, table([`simdgroup ${simdgroup}`, ...threads.map(String)], rows));
  }

  pickLane(event) {
    const box = this.lanes.getBoundingClientRect(), { size, columns } = this.painted;
    const column = Math.floor((event.clientX - box.left - this.painted.left) / size);
    const row = Math.floor((event.clientY - box.top) / size);
    if (column < 0 || column >= columns) return;
    this.showThread(row * columns + column);
  }

  /** The latest accesses of a thread. */
  showThread(thread) {
    const { run } = this,
      { kind, thread: threads, group } = run.columns,
      present = group[run.first(this.now)],
      rows = [];
    for (let i = this.now; i >= 0 && rows.length < 12; i--) {
      for (const event of run.eventsOf(i)) {
        if (threads[event] !== thread || group[event] !== present) continue;
        if (kind[event] === KIND.SIMD_FUNCTION || kind[event] === KIND.BARRIER_PASSED) continue;
        rows.push(this.row(event, i));
      }
    }
    this.inspect(`Thread ${thread} (simdgroup ${thread >> 5}, lane ${thread % LANES}), latest first`, rows);
  }

  row(event, instruction) {
    const { run } = this, array = run.arrayOf(event), place = run.place(event);
    const what = array ? `${array.name}[${run.span(event)[0]}]` : run.name(event);
    const does =
      this.theme.action(laneMarks(run, instruction).find((mark) => mark.event === event)?.action || "compute").words;
    const cells = [instruction + 1, run.columns.thread[event], does, what, valueText2(run.valuesOf(event))];
    return { cells: [...cells, place.line ? `${place.file}:${place.line}` : ""], instruction };
  }

  /** Show the first and last readers and writers of elements [from, to) of an array. */
  showCell(array, from, to, words) {
    const found = ends(this.run, array, from, to), rows = [];
    const add = (label, entry) => {
      if (!entry) return;
      const { event, instruction } = entry, one = this.row(event, instruction);
      rows.push({ instruction, cells: [label, ...one.cells] });
    };
    add("first write", found.firstWrite);
    if (found.writes > 1) add("last write", found.lastWrite);
    add("first read", found.firstRead);
    if (found.reads > 1) add("last read", found.lastRead);
    const counts = `${found.reads.toLocaleString("en-US")} reads, ${found.writes.toLocaleString("en-US")} writes`;
    this.inspect(`${words}: ${counts} by the recorded threadgroups`, rows, ["which"]);
  }

  showFault() {
    const { fault } = this.run.header, rows = [];
    const add = (label, event) => {
      if (event === null || event === undefined) return;
      const instruction = this.run.instructionOf[event], one = this.row(event, instruction);
      rows.push({ instruction, cells: [label, ...one.cells] });
    };
    add("earlier access", fault.earlier);
    add("fault", fault.event);
    if (fault.event !== null) this.seek(this.run.instructionOf[fault.event]);
    this.inspect(fault.message, rows, ["which"]);
  }

  inspect(title, rows, first = []) {
    const headings = [...first, "instruction", "thread", "does", "element", "value", "line"];
    const go = (row) => this.seek(row.instruction);
    replace(this.inspector, h("p", {}, title), rows.length ? table(headings, rows, { onclick: go }) : null);
    this.inspectorPanel.hidden = false;
    this.inspectorPanel.scrollIntoView?.({ block: "nearest" });
  }
}

const valueText2 = (values) => values.length ? valueText(values) : "";

const compact = (count) => count < 1000 ? String(count) : `${Math.round(count / 100) / 10}k`;

export const render = ({ model, el }) => {
  const style = h("style", {}, STYLE);
  const packet = model.get("packet"), options = model.get("options") || {};
  const view = new KernelView(new KernelRun(packet), options);
  el.append(style, view.element);
  const again = () => view.draw();
  const sizes = new ResizeObserver(again);
  sizes.observe(view.element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", again);
  view.drawNow();
  if (view.run.header.fault) view.showFault();
  return () => {
    if (view.playing) view.toggle();
    sizes.disconnect();
    scheme.removeEventListener("change", again);
  };
};

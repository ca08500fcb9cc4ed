// The accesses to a cell, of a thread, or around the fault of a recorded kernel: rows that lead to their moments.

import { h, replace, table } from "./dom.js";
import { KIND, LANES } from "./kernel_run_file.js";
import { ends, laneMarks, valueOrNothing } from "./kernel_run_marks.js";

export class Inspector {
  constructor(view, panel) {
    this.view = view;
    this.body = h("div", { class: "wb-kr-inspector", "aria-live": "polite" });
    this.element = panel("Who read it, who wrote it", null, this.body);
    this.element.hidden = true;
  }

  /** The latest accesses of a thread. */
  showThread(thread) {
    const { run, now } = this.view,
      { kind, thread: threads, group } = run.columns,
      present = group[run.first(now)],
      rows = [];
    for (let i = now; i >= 0 && rows.length < 12; i--) {
      for (const event of run.eventsOf(i)) {
        if (threads[event] !== thread || group[event] !== present) continue;
        if (kind[event] === KIND.SIMD_FUNCTION || kind[event] === KIND.BARRIER_PASSED) continue;
        rows.push(this.row(event, i));
      }
    }
    this.inspect(`Thread ${thread} (simdgroup ${thread >> 5}, lane ${thread % LANES}), latest first`, rows);
  }

  row(event, instruction) {
    const { run, theme } = this.view, array = run.arrayOf(event), place = run.place(event);
    const what = array ? `${array.name}[${run.span(event)[0]}]` : run.name(event);
    const does =
      theme.action(laneMarks(run, instruction).find((mark) => mark.event === event)?.action || "compute").words;
    const cells = [instruction + 1, run.columns.thread[event], does, what, valueOrNothing(run.valuesOf(event))];
    return { cells: [...cells, place.line ? `${place.file}:${place.line}` : ""], instruction };
  }

  /** Show the first and last readers and writers of elements [from, to) of an array. */
  showCell(array, from, to, words) {
    const found = ends(this.view.run, array, from, to), rows = [];
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
    const { run } = this.view, { fault } = run.header, rows = [];
    const add = (label, event) => {
      if (event === null || event === undefined) return;
      const instruction = run.instructionOf[event], one = this.row(event, instruction);
      rows.push({ instruction, cells: [label, ...one.cells] });
    };
    add("earlier access", fault.earlier);
    add("fault", fault.event);
    if (fault.event !== null) this.view.seek(run.instructionOf[fault.event]);
    this.inspect(fault.message, rows, ["which"]);
  }

  inspect(title, rows, first = []) {
    const headings = [...first, "instruction", "thread", "does", "element", "value", "line"];
    const go = (row) => this.view.seek(row.instruction);
    replace(this.body, h("p", {}, title), rows.length ? table(headings, rows, { onclick: go }) : null);
    this.element.hidden = false;
    this.element.scrollIntoView?.({ block: "nearest" });
  }
}

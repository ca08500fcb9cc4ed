// What happened to requests, and why.

import { h, plain, replace, setText } from "./dom.js";
import { Panel } from "./panel.js";

const MOST = 300;

export class EventsPanel extends Panel {
  constructor(view) {
    super(view, { id: "events", title: "Events", hint: "with the scheduler's reasons; click to go there" });
    this.rows = h("tbody");
    this.note = h("p", { class: "wb-note" });
    this.body.classList.add("wb-scroll");
    this.body.setAttribute("tabindex", "0");
    this.body.append(h("table", { class: "wb-table wb-events" }, h("thead", {}, h("tr", {}, ["step", "", "event", "request", "why"].map((name) => h("th", { scope: "col" }, name)))), this.rows), this.note);
  }

  /** Events up to the cursor, newest first, at most MOST. */
  collect() {
    const { store, cursor } = this, filter = cursor.filter.toLowerCase(), result = [];
    for (let step = cursor.step; step >= 0 && result.length < MOST; step--) {
      if (store.bounds.event[step + 1] === store.bounds.event[step]) continue;
      for (const event of store.events(step).reverse()) {
        if (event.kind !== "arrive" && (!filter || event.request.id.toLowerCase().includes(filter))) result.push(event);
      }
    }
    return result;
  }

  render() {
    const { cursor, theme, store } = this;
    if (!store.numSteps) return setText(this.note, "No steps yet.");
    const events = this.collect(), signature = `${theme.name} ${cursor.filter} ${cursor.step === cursor.last} ${events.length} ${events[0]?.step} ${events[0]?.request.index}`;
    setText(this.note, this.waitingNote());
    for (const row of this.rows.children) row.classList.toggle("wb-now", Number(row.dataset.step) === cursor.step);
    if (signature === this.signature) return;
    this.signature = signature;
    replace(this.rows, events.map((event) => {
      const { shape, colour } = theme.event(event.kind);
      return h("tr", { "data-step": event.step, class: event.step === cursor.step ? "wb-now" : null, onclick: () => cursor.seek(event.step) },
        h("td", { class: "wb-number" }, store.label(event.step)), h("td", {}, h("i", { class: `wb-mark wb-mark-${shape}`, style: `--wb-hue:${colour}` })), h("td", {}, event.kind),
        h("td", {}, h("bdi", {}, plain(event.request.id))), h("td", {}, h("bdi", {}, plain(event.reason, 160))));
    }));
  }

  waitingNote() {
    const { store, cursor } = this, waiting = store.value("num_waiting", cursor.step);
    if (!waiting) return "Nothing waits in this step.";
    const why = store.strings[store.value("waiting_reason", cursor.step)];
    return `${waiting} waiting in this step${why ? `: ${plain(why, 160)}` : ""}`;
  }

  tableTwin() {
    return {
      caption: "Events up to the cursor, newest first", headings: ["step", "event", "request", "why"],
      rows: this.collect().map((event) => ({ step: event.step, cells: [this.store.label(event.step), event.kind, plain(event.request.id), plain(event.reason, 160)] })), onclick: (row) => this.cursor.seek(row.step),
    };
  }
}

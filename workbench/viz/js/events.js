// Events of the requests, and the scheduler's reasons for them.

import { formatNumber, h, plain, replace, rowButton, setText, tableHead } from "./dom.js";
import { Panel } from "./panel.js";
import { nameOf } from "./request.js";
import { listOf } from "./words.js";

/** Maximum number of events in the list. */
const MOST = 300;

export class EventsPanel extends Panel {
  constructor(view) {
    super(view, { id: "events", title: "Events", hint: "with the scheduler's reasons; click one to go to its step" });
    this.rows = h("tbody");
    this.note = h("p", { class: "wb-note" });
    this.body.classList.add("wb-scroll");
    this.body.setAttribute("tabindex", "0");
    const head = tableHead(["step", "mark", "event", "request", "why"]);
    this.body.append(h("table", { class: "wb-table wb-events" }, head, this.rows), this.note);
  }

  /** Events up to the cursor, newest first; arrivals are left out. */
  collect() {
    const { store, cursor } = this, result = [];
    for (let step = cursor.step; step >= 0 && result.length < MOST; step--) {
      const [from, to] = store.span("event", step);
      if (from === to) continue;
      for (const event of store.events(step).reverse()) {
        if (event.kind !== "arrive" && cursor.matches(event.request)) result.push(event);
      }
    }
    return result;
  }

  render() {
    const { cursor, theme, store } = this;
    if (!store.numSteps) return setText(this.note, "No steps yet.");
    setText(this.note, this.waitingNote());
    for (const row of this.rows.children) row.classList.toggle("wb-now", Number(row.dataset.step) === cursor.step);
    const events = this.collect(), [newest] = events, atEnd = cursor.step === cursor.last;
    const shown = [theme.name, cursor.filter, atEnd, events.length, newest?.step, newest?.request.index];
    const signature = JSON.stringify(shown);
    if (signature === this.signature) return;
    this.signature = signature;
    const hadFocus = this.rows.contains(this.rows.getRootNode().activeElement);
    replace(this.rows, events.map((event) => this.row(event)));
    if (hadFocus) this.rows.querySelector("button")?.focus({ preventScroll: true }); // of the step that it went to
  }

  row(event) {
    const { cursor } = this, { shape, colour } = this.theme.event(event.kind);
    const now = event.step === cursor.step ? "wb-now" : null;
    return h(
      "tr",
      { "data-step": event.step, class: now, onclick: () => cursor.seek(event.step) },
      h("td", { class: "wb-number" }, rowButton(this.store.label(event.step))),
      h("td", {}, h("i", { class: `wb-mark wb-mark-${shape}`, style: `--wb-hue:${colour}` })),
      h("td", {}, event.kind),
      h("td", {}, h("bdi", {}, nameOf(event.request))),
      h("td", {}, h("bdi", {}, this.why(event))),
    );
  }

  /** The reason of an event; of an admission also why it found no more in the prefix cache. */
  why({ kind, request, step, words }) {
    const miss = kind === "admit" || kind === "resume" ? this.store.chunkIn(request, step)?.miss : "";
    return plain([words, miss].filter(Boolean).join("; "), 200);
  }

  /** The number of waiting requests, and each reason with those it holds for, if these are not all. */
  waitingNote() {
    const { store, cursor } = this, { step } = cursor, waiting = store.value("num_waiting", step);
    if (!waiting) return "No request is waiting.";
    const reasons = new Map();
    for (const request of store.requests) {
      if (!["waiting", "preempted"].includes(store.stateOf(request, step))) continue;
      const why = store.whyNot(request, step);
      if (why) reasons.set(why, [...(reasons.get(why) ?? []), request]);
    }
    const parts = [...reasons].map(([why, those]) =>
      (those.length < waiting ? `${listOf(those.map((request) => nameOf(request)))}: ` : "") + plain(why, 160)
    );
    return `${formatNumber(waiting)} waiting in this step${parts.length ? `: ${parts.join("; ")}` : ""}`;
  }

  tableData() {
    const cells = (event) => {
      return [this.store.label(event.step), event.kind, nameOf(event.request), this.why(event)];
    };
    return {
      caption: "Events up to the cursor, newest first",
      headings: ["step", "event", "request", "why"],
      rows: this.collect().map((event) => ({ step: event.step, cells: cells(event) })),
      onclick: (row) => this.cursor.seek(row.step),
    };
  }
}

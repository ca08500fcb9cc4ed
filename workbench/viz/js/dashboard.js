// The view as a whole: builds the panels, receives packets, and redraws once per animation frame.
// It speaks to its host only through a model with get / set / save_changes / on / off, as anywidget defines it; a saved
// page gives it a model that never changes.

import { Classroom, HIDDEN } from "./classroom.js";
import { Areas, isLayout, makePanels } from "./areas.js";
import { Connection, NO_SERVER } from "./connection.js";
import { Controls } from "./controls.js";
import { Cursor } from "./cursor.js";
import { downloaded, h, offerFile, plain } from "./dom.js";
import { EndCard } from "./end_card.js";
import { poolColumns, readableScale, tileKind } from "./geometry.js";
import { Film } from "./film.js";
import { Inspector } from "./inspector.js";
import { isKernelPage, showKernelPage } from "./kernel_page.js";
import { bindKeys, keyList } from "./keys.js";
import { LinkBox } from "./link_box.js";
import { OwnQuestions } from "./own_questions.js";
import { Place } from "./place.js";
import { decodePacket } from "./packet.js";
import { PhaseBox } from "./phase_box.js";
import { BreakpointsForm, close, openBelow } from "./popovers.js";
import { Question } from "./question.js";
import { Store } from "./store.js";
import { STYLE } from "./style.js";
import { hideStill, watchSurroundings } from "./surroundings.js";
import { explainTerms } from "./terms.js";
import { Theme } from "./theme.js";
import { Tooltip } from "./tooltip.js";
import { TuningForm } from "./tuning.js";
import { WhatIf } from "./what_if.js";

const NOTHING_TO_DO = "Every request is finished, so there is nothing to run. Ask the model something first.";

const UNHEARD = "No answer yet: while a cell runs, its kernel does not hear the buttons. They work when the cell has " +
  "ended. Interrupt the kernel to stop engine.run() now, or use engine.start(), which runs in the background.";

const GONE = "The kernel of this view has ended or was restarted: run its cell again. Its steps stay to be looked at.";

/** Reasons for which a view offers no "What if". */
const NO_FORK = "What-if runs need an engine that can simulate its run.";
const NO_HOST = "A saved page simulates nothing: open its trace with workbench trace watch.";
const NOT_SIMULATED = "A run without its first steps, or beside another one, is not simulated again.";

/** Milliseconds after which a command without an answer is explained. */
const PATIENCE_MS = 1500;

/** The commands that the next one repeats: so many of the last milliseconds, and its bytes together with them. */
const MOST_AGAIN = 4, AGAIN_MS = 5000, AGAIN_BYTES = 8192;

const bytesOf = (args) => new TextEncoder().encode(JSON.stringify(args)).length;

/** Milliseconds without a change after which the panels outside the window are drawn as well. */
const SETTLED_MS = 300;

class View {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.status = model.get("status") || {};
    this.options = model.get("options") || {};
    this.store = new Store();
    this.cursor = new Cursor(this.store, (what) => this.changed(what));
    this.cursor.live = this.live;
    this.theme = new Theme(this.options.theme || "auto");
    this.tooltip = new Tooltip(root);
    this.place = new Place(this);
    this.commandCount = 0;
    this.sender = Math.random().toString(36).slice(2);
    this.sent = []; // commands that the next one repeats: hosts pass on the last value of a property alone
    this.exact = false; // whether the numbers of a step are told, too
    this.frameRequest = null;
    // For the test that compares them with the same functions in Python.
    this.geometry = { poolColumns, readableScale, tileKind };
    this.panels = makePanels(this, this.options.panels);
    /** Whether all panels are here, to be shown in views; a choice of panels is shown as it is. */
    this.whole = !this.options.panels?.length;
    this.inspector = new Inspector(this);
    this.linkBox = new LinkBox(this);
    this.connection = new Connection(this);
    this.controls = new Controls(this);
    this.help = keyList(Boolean(model.get("still")));
    this.breakpointsForm = new BreakpointsForm(this);
    this.whatIf = new WhatIf(this);
    this.tuningForm = new TuningForm(this);
    this.phaseBox = new PhaseBox(this);
    this.classroom = new Classroom(this);
    this.own = new OwnQuestions(this);
    this.question = new Question(this);
    this.film = new Film(this);
    this.endCard = new EndCard(this);
    this.popovers = [
      this.help,
      this.breakpointsForm.element,
      this.whatIf.element,
      this.tuningForm.element,
      this.linkBox.element,
    ];
    this.awaited = null; // what the page says while the host makes something that it has asked for
    this.unchanged = null; // the run as it was, simulated like the other one, which is compared with it
    this.otherCount = 0;
    this.build();
    this.show(this.whole ? this.firstView() : "all");
    this.endKeys = bindKeys(root, this);
    explainTerms(root, this.tooltip);
    this.applyTheme();
    this.endWatching = watchSurroundings(this);
    this.showStill = hideStill(model.get("still"));
  }

  build() {
    const { root, controls } = this;
    const bold = (text) => h("b", {}, text);
    const legend = [bold("Solid"), " is prefill, ", bold("light with a dot"), " is decode, ", bold("hatched")];
    this.areas = new Areas();
    const title = this.options.page ? [h("h2", { class: "wb-announce" }, "The run")] : []; // above every h3
    controls.element.append(...title, ...this.popovers);
    const skip = () => root.querySelector(".wb-panel canvas[tabindex]")?.focus();
    root.append(
      h("style", {}, STYLE),
      h("button", { class: "wb-button wb-skip", type: "button", onclick: skip }, "Skip to the pictures"),
      controls.element,
      this.classroom.element,
      this.phaseBox.element,
      this.film.element,
      this.question.element,
      ...this.areas.elements,
      h("p", { class: "wb-reading" }, "Colours mark the requests in focus. ", legend, " is recomputed."),
      this.inspector.element,
      this.tooltip.element,
    );
    root.classList.add("wb-root");
    root.classList.toggle("wb-page", Boolean(this.options.page));
    if (this.options.page && !root.closest("main")) root.setAttribute("role", "main");
    root.classList.toggle("wb-bare", Boolean(this.options.bare));
    if (this.options.height) Object.assign(root.style, { maxHeight: `${this.options.height}px`, overflow: "auto" });
    root.tabIndex = -1;
    root.addEventListener("focusin", (event) => {
      this.lastFocus = event.target;
    });
  }

  /** The view that the address or the host asks for. An address such as #kernel/12 names a step too. */
  firstView() {
    const [asked, step] = this.options.page ? location.hash.slice(1).split("/") : [], { view } = this.options;
    if (/^\d+$/.test(step ?? "")) this.place.later = { step: Number(step), follow: false, request: null };
    this.chosen = [asked, view].find(isLayout);
    return this.chosen ?? "story";
  }

  /** Show a view: put its panels into the areas of the page. */
  show(name) {
    if (!isLayout(name) || (!this.whole && name !== "all")) return;
    this.shown = name;
    this.root.dataset.view = name;
    const left = this.isIncident && !this.store.hasTexts ? "texts" : "";
    this.areas.fill(name, (id) => id === "end" ? this.endCard.element : id !== left && this.panel(id)?.element);
    for (const panel of this.panels) panel.resized();
    if (this.options.page && location.protocol !== "about:") history.replaceState(null, "", `#${name}`);
    this.changed("data");
  }

  panel(id) {
    return this.panels.find((panel) => panel.id === id);
  }

  /** The name of the run. */
  get name() {
    return plain(this.status.name || this.store.facts.model?.name || "Trace", 40);
  }

  get live() {
    return Boolean(this.status.live) && !this.gone;
  }

  /** Whether this page may control the engine, or ask the model: "control", "ask". A class may refuse it. */
  may(right) {
    return this.live && !this.status.refused?.[right];
  }

  /** Whether the class predicts what *What if* and *Which setting?* would tell this page. */
  get predicts() {
    return Boolean(this.status.refused?.foresee);
  }

  /**
   * Nothing will answer any more: a kernel has lost the engine, or the page its server.
   * @param {string} words Say so.
   * @param {string} gone The same in two words.
   */
  lose(words, gone) {
    this.gone = gone;
    this.cursor.live = false;
    this.popovers.forEach(close);
    clearTimeout(this.waiting);
    if ((this.status.handled ?? 0) < this.commandCount) this.question.ask.takeBack();
    this.say(words, "problem");
    this.changed("data");
  }

  /** Whether this is a recording with times of another engine, which a page shows as an incident. */
  get isIncident() {
    return !this.live && Boolean(this.store.facts.incident) && this.store.timed();
  }

  /** The stalls that the host has found in the steps that are here. */
  get stalls() {
    const { store } = this, found = this.status.incident?.stalls ?? [];
    return found.map(([step, words, excess]) => ({ step: step - store.label(0), words, excess }))
      .filter(({ step }) => step >= 0 && step < store.numSteps)
      .map((stall) => ({ ...stall, time: store.value("time", stall.step) }));
  }

  /** Open the page of an incident at its largest stall, unless a step was asked for or the cursor has moved. */
  openAtStall() {
    const { cursor, options, place, stalls } = this, [largest] = [...stalls].sort((a, b) => b.excess - a.excess);
    const isAsked = place.later || Number.isInteger(this.model.get("cursor")?.step);
    if (!largest || !options.page || !this.isIncident || this.openedAt !== cursor.step || isAsked) return;
    this.openedAt = null;
    cursor.seek(largest.step, { stay: true });
    place.settle();
    const which = stalls.length > 1 ? `the largest of ${stalls.length} stalls` : "the stall";
    this.say(`Opened at ${which}: ${largest.words}.`);
  }

  can(ability) {
    const simulates = ability === "fork" || ability === "tune", own = simulates || ability === "save_html";
    if (this.gone || (simulates && this.predicts)) return false;
    return (own || this.may("control")) && (this.status.can || []).includes(ability);
  }

  // -- the host --------------------------------------------------------------------------------------------------

  receive(packet) {
    if (!packet?.byteLength) return;
    const { store, cursor, theme } = this, before = store.numSteps, first = store.label(0), { run } = store.facts;
    const hues = theme.slotsById(store.requests);
    if (!store.append(packet)) return this.send("resend");
    const replaced = before > 0 && store.facts.run !== run,
      forgotten = before && !replaced ? store.label(0) - first : 0;
    if (forgotten) cursor.forget(forgotten);
    if (replaced) this.beginAnother();
    if (forgotten || replaced) theme.forget(replaced ? undefined : hues);
    theme.focusRunning(store.requests);
    this.claimOwn();
    if (!this.mounted) this.mount();
    if (before === 0 && store.numSteps && !this.live && !this.status.watching) {
      cursor.openRecording();
      this.openedAt = cursor.step;
    }
    if (this.options.page && !this.opened && this.isIncident) {
      this.opened = true;
      this.show(this.chosen ?? "incident");
    }
    if (forgotten || replaced || store.numSteps === before) this.changed("data");
    if (forgotten || replaced || store.numSteps !== before) cursor.grown();
    if (before === 0 && store.numSteps) this.place.settle();
    this.openAtStall();
    this.place.takeLater();
  }

  /** Another run has taken the place of the one on display: nothing of that one is left. */
  beginAnother() {
    const { cursor, store } = this;
    this.other = this.unchanged = null;
    this.showComparison(false);
    cursor.hover = {};
    if (cursor.selected >= store.requests.length) cursor.selected = null;
    cursor.step = Math.min(cursor.step, cursor.last);
  }

  /** Mark the requests that were asked for here; they have a colour that no other has. */
  claimOwn() {
    const { store, theme } = this;
    let claimed = false;
    this.own.keep();
    for (const [id] of this.own.all) {
      const request = store.byId.get(id);
      if (!request || request.own) continue;
      request.own = true;
      store.nameInPictures(request);
      theme.claim(request);
      claimed = true;
    }
    return claimed;
  }

  /** Tell the host that packets arrive. */
  mount() {
    this.mounted = true;
    this.model.set("mounted", true);
    this.model.save_changes();
  }

  /** Take the whole second run of a comparison; if both were simulated, the first one follows it. */
  receiveOther(packet) {
    if (!packet?.byteLength) return;
    const other = new Store();
    if (!other.append(packet)) return;
    this.other = other;
    this.unchanged = null;
    const { length } = decodePacket(packet);
    if (length < packet.byteLength) {
      this.unchanged = new Store();
      this.unchanged.append(new DataView(packet.buffer, packet.byteOffset + length, packet.byteLength - length));
    }
    this.otherCount++;
    this.whatIf.update(this.comparison || {});
    this.showComparison(true);
  }

  /** Ask the host to do something; a saved page has no host. */
  send(name, args = {}) {
    if (this.gone) return;
    const id = ++this.commandCount, now = Date.now(), { handled = 0 } = this.status;
    this.sent = this.sent.filter((each) => each.id > handled && now - each.at < AGAIN_MS).slice(-MOST_AGAIN);
    let bytes = bytesOf(args); // a server takes no message of any size
    const again = this.sent.filter((each) => (bytes += bytesOf(each.args)) <= AGAIN_BYTES);
    const before = Object.fromEntries(again.map((each) => [each.id, { name: each.name, args: each.args }]));
    this.model.set("command", { id, name, args, sender: this.sender, before });
    this.model.save_changes();
    this.sent.push({ id, name, args, at: now });
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      if (!this.live || (this.status.handled ?? 0) >= id) return;
      this.say(this.connection.served ? NO_SERVER : UNHEARD);
      this.connection.ask();
    }, PATIENCE_MS);
  }

  /** Take what the host has made for this page: a link to copy, the page of a kernel, or a page to save. */
  takeDownload(bytes) {
    if (!bytes?.byteLength) return;
    const { name, content } = downloaded(bytes);
    if (name === "link") this.linkBox.take(new TextDecoder().decode(content));
    else if (isKernelPage(name)) {
      this.wait(null);
      showKernelPage(this.root, name, content);
    } else offerFile(new Blob([content], { type: "text/html" }), name);
  }

  statusChanged() {
    const before = [this.live, JSON.stringify(this.status.incident)];
    this.status = this.model.get("status") || {};
    if (this.status.message) this.awaited = null;
    else if (this.awaited) this.status = { ...this.status, message: this.awaited, kind: "note" };
    this.cursor.live = this.live;
    const claimed = this.claimOwn();
    const same = !claimed && before[0] === this.live && before[1] === JSON.stringify(this.status.incident);
    this.openAtStall();
    this.whatIf.follow(this.status);
    this.changed(same ? "status" : "data");
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  changed(what) {
    for (const panel of this.panels) panel.changed(what);
    if (what !== "hover") this.controlsStale = true;
    this.requestFrame();
  }

  requestFrame() {
    this.frameRequest ??= requestAnimationFrame(() => {
      this.frameRequest = null;
      this.draw();
    });
  }

  /** Draw what has changed since the last frame. */
  draw() {
    if (this.controlsStale) {
      this.controlsStale = false;
      this.controls.update();
      this.breakpointsForm.update(this.status);
      this.tuningForm.update(this.status);
      this.phaseBox.update(this.status);
      this.classroom.update();
      this.question.update();
      this.film.update();
      this.endCard.update();
      this.inspector.update();
      this.controls.announceStep();
    }
    for (const panel of this.panels) panel.frame();
    this.tooltip.update();
    this.keepFocus();
    this.place.share();
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.panels.forEach((panel) => panel.frame(true)), SETTLED_MS);
  }

  /** The focus stays in the view when the element that had it disappears, so that the keys still work. */
  keepFocus() {
    const { lastFocus, root } = this, active = root.getRootNode().activeElement;
    if (!lastFocus || lastFocus === root || root.contains(active)) return;
    if (lastFocus.isConnected && lastFocus.offsetParent !== null) return;
    this.lastFocus = null;
    if (!active || active === document.body) root.focus({ preventScroll: true });
  }

  applyTheme() {
    this.theme.applyTo(this.root);
    this.theme.applyTo(this.tooltip.element);
    this.changed("theme");
  }

  // -- actions of buttons and keys -------------------------------------------------------------------------------

  /** Tell the step in a sentence, or in its numbers too. */
  toggleLevel() {
    this.exact = !this.exact;
    this.changed("status");
  }

  nextTheme() {
    this.theme.next();
    this.applyTheme();
    // A page around the view may follow it.
    this.root.dispatchEvent(new CustomEvent("wb-theme", { bubbles: true, composed: true, detail: this.theme.name }));
  }

  setFilter(filter) {
    this.cursor.filter = filter;
    this.changed("data");
  }

  toggleFocus(request) {
    if (!this.theme.toggle(request, this.store.requests)) {
      this.say("Requests that run beside this one have all six colours. Take one of them out of focus first.");
    }
    this.changed("focus");
  }

  focusScheduled() {
    if (!this.store.numSteps) return;
    this.theme.focusOnly(this.store.chunks(this.cursor.step).map((chunk) => chunk.request));
    this.changed("focus");
  }

  toggleHelp() {
    if (!close(this.help)) openBelow(this.help, this.controls.helpButton);
  }

  toggleTables() {
    const on = this.panels.some((panel) => !panel.asTable);
    for (const panel of this.panels) panel.showTable(on);
  }

  /** Run, pause or step the engine, or say why it cannot be done now. */
  engineDo(name) {
    const { state } = this.status;
    if (!this.may("control")) return this.say("Only the teacher controls the engine of this class.");
    if (name === "pause" && state !== "running") return this.say("Nothing is running, so there is nothing to pause.");
    if (name !== "pause" && state === "idle") return this.say(NOTHING_TO_DO);
    if (name !== "pause" && state === "running") return this.say("The engine is running already. Pause it to step.");
    this.send(name);
  }

  stepInto() {
    if (!this.can("step_into")) return this.say("Stepping into a step needs a live engine.");
    const running = "The engine is running. Pause it, then step into its next step.";
    if (this.status.state === "running") return this.say(running);
    if (this.status.state === "idle" && !this.status.phase) return this.say(NOTHING_TO_DO);
    this.send("step_into");
  }

  /** Go to the box for questions. */
  ask() {
    if (!this.live) return this.say("This is a recording: only a live engine can be asked.");
    if (!this.may("ask")) return this.say("The teacher has not opened questions to the class.");
    if (!this.panel("texts")) return this.say("The box for questions comes with the panel “texts”, which is not here.");
    if (this.shown !== "all") this.show("story");
    this.question.update();
    this.question.ask.focus();
  }

  toggleBreakpoints() {
    if (!this.can("breakpoints")) return this.say("Breakpoints need a live engine; this is a recording.");
    const { element } = this.breakpointsForm;
    if (!close(element)) openBelow(element, this.controls.breakpoints);
  }

  toggleFork() {
    if (this.classroom.hides) return this.say(HIDDEN);
    if (!this.can("fork")) {
      if (this.live && !this.store.isPart) return this.say(NO_FORK);
      return this.say(this.status.explains ? NOT_SIMULATED : NO_HOST);
    }
    if (!this.store.numSteps) return this.say("There is no step yet to simulate again.");
    if (!close(this.whatIf.element)) this.whatIf.open(this.controls.fork);
  }

  toggleTuning() {
    if (!close(this.tuningForm.element)) this.tuningForm.open(this.controls.tune);
  }

  /** Simulate the run under another configuration from a step on, and show the result beside it, or scroll to it. */
  simulate(step, changes, { scroll = false } = {}) {
    this.scrolls = scroll;
    this.whatIf.expect({ step, changes });
    // The same simulation as before arrives as the same packet, which changes nothing: show what is here.
    const { comparison } = this, { fork } = comparison || {};
    const whole = fork?.up_to === this.store.label(this.cursor.last);
    if (whole && fork.at_step === step && JSON.stringify(fork.changes) === JSON.stringify(changes)) {
      this.whatIf.update(comparison);
      this.showComparison(true);
    }
    this.send("fork", { at_step: step, changes });
  }

  toggleCompare() {
    if (!this.other) return this.toggleFork();
    this.showComparison(!this.comparing);
  }

  /** The findings about the two runs, a and b; they come with b. */
  get comparison() {
    return this.other ? this.other.comparison ?? this.store.comparison : undefined;
  }

  /** Whether the panels draw b, and a is the run beside it. */
  get drawsSecond() {
    return Boolean(this.other && !this.other.comparison);
  }

  /** Whether two runs are shown beside each other. */
  get comparing() {
    return this.panel("compare")?.element.hidden === false;
  }

  showComparison(shown) {
    const panel = this.panel("compare");
    if (panel) panel.element.hidden = !shown;
    // A closed comparison leaves no outlines behind; a view without its panel has them alone.
    this.cursor.beside = (shown || !panel) && !this.comparison?.refused ? this.other : null;
    this.changed("data");
    this.whatIf.makeRoom();
    if (!shown || !panel || !this.scrolls) return;
    this.scrolls = false; // the answer has come: it may be below the window, or above
    this.scrollTo(panel.element);
  }

  /** Bring an element to the top of the window, below the bars that stay there, unless its top is in sight. */
  scrollTo(element) {
    const bars = this.controls.element, covered = getComputedStyle(bars).position === "sticky" ? bars.offsetHeight : 0;
    const { top } = element.getBoundingClientRect();
    if (top >= covered && top < innerHeight / 2) return;
    element.style.scrollMarginTop = `${covered}px`;
    requestAnimationFrame(() => element.scrollIntoView({ block: "start" }));
  }

  /** Close what is open: a dialog, the search, the drawer; when nothing is, follow the newest step. */
  escape() {
    const closed = this.popovers.map(close).some(Boolean) || this.controls.search.close() || this.film.close();
    const { activeElement } = this.root.getRootNode();
    if (activeElement?.matches?.("input, textarea, select") && this.root.contains(activeElement)) {
      this.root.focus({ preventScroll: true });
    } else if (!closed && this.inspector.pinned) this.inspector.pin(null);
    else if (!closed) this.cursor.toLive();
  }

  /** Show a message; the next status of the host replaces it. */
  say(message, kind = "note") {
    this.status = { ...this.status, message, kind };
    this.changed("step");
  }

  /** Show what the page waits for until the host sends it, or says something else; null for nothing any more. */
  wait(message) {
    this.awaited = message;
    this.say(message);
  }

  destroy() {
    this.cursor.playing = false;
    this.endWatching();
    this.endKeys();
    this.connection.end();
    clearTimeout(this.waiting);
    this.tooltip.end();
    this.tooltip.element.remove();
    this.showStill();
    if (this.frameRequest) cancelAnimationFrame(this.frameRequest);
  }
}

export function render({ model, el }) {
  const root = h("div");
  el.append(root);
  const view = new View(model, root);
  const listeners = {
    "change:packet": () => view.receive(model.get("packet")),
    "change:status": () => view.statusChanged(),
    "change:other": () => view.receiveOther(model.get("other")),
    "change:cursor": () => view.place.take(model.get("cursor")),
    "change:step": () => view.place.takeStep(model.get("step")),
    "change:download": () => view.takeDownload(model.get("download")),
  };
  // Of ipywidgets alone: the channel to the kernel, open until now.
  if (model.get("still")) listeners.comm_live_update = () => view.lose(GONE, "kernel ended");
  for (const [event, listener] of Object.entries(listeners)) model.on(event, listener);
  view.receive(model.get("packet"));
  view.receiveOther(model.get("other"));
  view.place.take(model.get("cursor"));
  view.classroom.begin();
  // For tests, and for use in a browser's console: the state behind the picture.
  root.workbench = view;
  return () => {
    for (const [event, listener] of Object.entries(listeners)) model.off(event, listener);
    view.destroy();
  };
}

export default { render };

// Controls of the engine (run, pause, step, ask) and, apart from them, of the cursor that moves through its steps;
// below them the sentence that tells the step at the cursor.

import { counted, formatNumber, h, plain, replace, select, setText, timeWords, unusable } from "./dom.js";
import { PhaseStrip } from "./phase_strip.js";
import { SearchBox } from "./search.js";
import { withTerms } from "./terms.js";
import { heldOf, numbersOf } from "./words.js";

const SPEEDS = [1, 4, 8, 20, 60];

/** Number of characters of a name beside which a screen of 1440 pixels has no room for every button. */
const LONG_NAME = 14;

/** The views, by the words of their buttons. */
export const VIEWS = [["story", "Story"], ["scheduler", "Scheduler"], ["kernel", "Kernel"], ["all", "All"], [
  "incident",
  "Incident",
]];

/** A button with a description. Its name begins with its visible words, so that speech control finds it. */
function button(label, title, onclick, more = {}) {
  const name = /\w/.test(label) && !title.startsWith(label) ? `${label}: ${title}` : title;
  return h("button", { class: "wb-button", type: "button", title, "aria-label": name, onclick, ...more }, label);
}

export class Controls {
  constructor(view) {
    this.view = view;
    this.announcement = h("p", { class: "wb-announce", "aria-live": "polite" });
    this.message = h("p", { class: "wb-message", role: "alert", hidden: true });
    this.reload = button("Load the page again", "Show what the server shows now", () => view.connection.reload());
    this.reload.hidden = true;
    this.sentence = h("p", { class: "wb-sentence" });
    this.numbers = h("p", { class: "wb-numbers", hidden: true });
    this.search = new SearchBox(view);
    this.phases = new PhaseStrip(view);
    const bars = [this.engineBar(), this.cursorBar()], texts = [this.message, this.reload, this.announcement];
    this.element = h("div", { class: "wb-controls" }, bars, this.sentence, this.numbers, this.phases.element, texts);
  }

  // -- building --------------------------------------------------------------------------------------------------

  engineBar() {
    const { view } = this;
    this.name = h(view.options.page ? "h1" : "strong", { class: "wb-name" });
    this.badge = h("span", { class: "wb-badge" });
    const primary = { class: "wb-button wb-primary" };
    this.run = button("Run", "Run the engine until all requests are finished", () => view.engineDo("start"), primary);
    this.pause = button("Pause", "Pause the engine after the current step", () => view.engineDo("pause"));
    this.stepEngine = button("Step", "Run one engine step", () => view.engineDo("step"));
    this.into = button("Step into", "Take the next step phase by phase (I)", () => view.stepInto());
    this.add = button("Ask", "Queue another request (A)", () => view.ask());
    this.breakpoints = button("Breakpoints", "Pause the engine on a condition (B)", () => view.toggleBreakpoints());
    const forkTitle = "Simulate the run with another configuration (W)";
    this.fork = button("What if", forkTitle, () => view.toggleFork());
    const buttons = [this.run, this.pause, this.stepEngine, this.into, this.add, this.breakpoints, this.fork];
    this.engine = h("div", { class: "wb-group wb-engine", role: "group", "aria-label": "Engine" }, buttons);
    const tuneTitle = "Find the setting that meets a target";
    this.tune = button("Which setting?", tuneTitle, () => view.toggleTuning());
    this.compare = button("Compare", "Show or hide the comparison of two runs (C)", () => view.toggleCompare());
    this.fold = button("Tools", "Show or hide the other tools", () => this.toggleTools(), { "aria-expanded": "false" });
    this.fold.classList.add("wb-fold");
    for (const rare of [this.into, this.breakpoints, this.tune]) rare.classList.add("wb-foldable");
    for (const rarest of [this.into, this.breakpoints]) rarest.classList.add("wb-desk-fold");
    this.add.classList.add("wb-phone-fold"); // the box is below
    const title = h("div", { class: "wb-title" }, this.name, this.badge);
    return h(
      "div",
      { class: "wb-bar wb-first-bar" },
      title,
      this.engine,
      this.tune,
      this.compare,
      this.fold,
      h("div", { class: "wb-group wb-of-view" }, this.viewControls()),
    );
  }

  viewControls() {
    const { view } = this;
    const axisTitle = "Switch the horizontal axis between steps and wall time";
    this.views = VIEWS.map(([name, label], i) => {
      const props = { title: `Show the ${label.toLowerCase()} panels (${i + 1})`, onclick: () => view.show(name) };
      return h("button", { class: "wb-tab", type: "button", "aria-pressed": "false", ...props }, label);
    });
    this.tabs = h("div", { class: "wb-tabs", role: "group", "aria-label": "View" }, this.views);
    this.axis = button("x: step", axisTitle, () => this.toggleAxis());
    this.axis.removeAttribute("aria-label"); // its words change
    this.level = button("Words: plain", "", () => view.toggleLevel(), { "aria-pressed": "false" });
    this.level.title = "Switch between a sentence and the numbers of a step";
    this.level.removeAttribute("aria-label"); // its words change
    this.helpButton = button("?", "Keyboard shortcuts (?)", () => view.toggleHelp());
    const theme = button("◐", "Switch between light and dark", () => view.nextTheme());
    for (const rare of [this.axis, this.level, theme, this.helpButton]) rare.classList.add("wb-foldable");
    for (const rarest of [this.axis, this.level, theme]) rarest.classList.add("wb-desk-fold");
    return [
      this.tabs,
      this.search.element,
      this.axis,
      this.level,
      theme,
      this.helpButton,
    ];
  }

  cursorBar() {
    const { cursor } = this.view, focusTitle = "Colour the requests scheduled at the cursor, up to six";
    const move = (steps) => () => cursor.seek(cursor.step + steps);
    this.play = button("▶", "Play or pause (Space)", () => this.togglePlay());
    const range = { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step at the cursor" };
    this.slider = h("input", { ...range, oninput: () => cursor.seek(Number(this.slider.value)) });
    this.position = h("output", { class: "wb-position" });
    this.clock = h("span", { class: "wb-clock wb-foldable", hidden: true });
    const speeds = SPEEDS.map((speed) => [speed, `${speed}/s`]);
    this.speed = select("Playback speed in steps per second", speeds, () => {
      cursor.speed = Number(this.speed.value);
    });
    this.speed.value = cursor.speed;
    this.follow = button("Follow", "Go to the newest step and follow it (Esc)", () => this.catchUp());
    this.follow.classList.add("wb-live");
    this.follow.removeAttribute("aria-label"); // its words change
    this.link = this.view.linkBox.button();
    this.save = button(
      "Save HTML",
      "Save the steps of this page as one file that opens offline, at this place",
      () => this.view.place.savePage(),
    );
    this.explain = button("Explain this step", "Play it in five scenes (E)", () => this.view.film.show());
    for (const rare of [this.explain, this.link, this.save]) rare.classList.add("wb-foldable");
    this.save.classList.add("wb-behind-fold");
    for (const second of [this.search.element, this.speed]) second.classList.add("wb-low-fold", "wb-phone-fold");
    const first = button("|◀", "First step (Home)", () => cursor.seek(0));
    const last = button("▶|", "Last step (End)", () => cursor.seek(cursor.last));
    for (const end of [first, last]) end.classList.add("wb-phone-fold"); // the ends of the slider
    return h(
      "div",
      { class: "wb-bar wb-transport", role: "group", "aria-label": "Cursor" },
      first,
      button("‹", "Previous step (←)", move(-1)),
      this.play,
      button("›", "Next step (→)", move(1)),
      last,
      this.slider,
      this.position,
      this.clock,
      this.speed,
      this.follow,
      this.explain,
      this.link,
      this.save,
      button("Colour running requests", focusTitle, () => this.view.focusScheduled(), {
        class: "wb-button wb-wide-only",
      }),
    );
  }

  // -- acting ----------------------------------------------------------------------------------------------------

  togglePlay() {
    this.view.cursor.togglePlay();
    this.update();
  }

  /** Follow the newest step, or in a class the teacher. */
  catchUp() {
    const { classroom, cursor } = this.view;
    if (classroom.isAway) classroom.goBack();
    else cursor.toLive();
  }

  /** Show or hide what is folded. */
  toggleTools() {
    const { dataset } = this.view.root, shown = dataset.tools !== "true";
    dataset.tools = String(shown);
    this.fold.setAttribute("aria-expanded", String(shown));
  }

  toggleAxis() {
    const { cursor } = this.view;
    cursor.axis = cursor.byTime ? "step" : "time";
    this.view.changed("range");
  }

  // -- showing ---------------------------------------------------------------------------------------------------

  update() {
    const { view } = this, { store, cursor, status, live } = view, { state } = status;
    setText(this.name, view.name);
    this.name.title = view.name; // a narrow bar cuts it
    setText(this.badge, this.badgeText());
    this.badge.title = this.badge.textContent; // a narrow bar cuts it
    this.badge.dataset.state = live ? state || "recording" : "recording";
    view.root.dataset.follows = String(live && !view.may("control"));
    this.engine.hidden = !view.may("control") && !view.can("fork");
    for (const element of [this.run, this.pause, this.stepEngine]) element.hidden = !view.may("control");
    this.add.hidden = !view.may("ask");
    for (const element of [this.run, this.stepEngine, this.into]) unusable(element, state !== "paused");
    unusable(this.pause, state !== "running");
    this.into.hidden = !view.can("step_into");
    this.breakpoints.hidden = !view.can("breakpoints");
    this.fork.hidden = !view.can("fork") || !store.numSteps;
    this.tune.hidden = !view.can("tune") || !store.timed();
    this.compare.hidden = !view.other || view.predicts;
    const crowded = !this.compare.hidden || view.name.length > LONG_NAME;
    view.root.dataset.acts = this.engine.hidden ? "none" : crowded ? "many" : "few";
    this.compare.setAttribute("aria-pressed", String(view.comparing));
    this.views.forEach((element, i) => {
      element.setAttribute("aria-pressed", String(VIEWS[i][0] === view.shown));
      element.hidden = VIEWS[i][0] === "incident" && !view.isIncident;
    });
    this.tabs.hidden = !view.whole;
    this.link.hidden = !status.explains || !store.numSteps || view.gone;
    this.save.hidden = !view.can("save_html") || !store.numSteps;
    this.axis.hidden = !store.timed();
    setText(this.axis, cursor.byTime ? "x: time" : "x: step");
    setText(this.play, cursor.playing ? "❚❚" : "▶");
    this.slider.max = cursor.last;
    this.slider.value = cursor.step;
    this.slider.disabled = store.numSteps < 2;
    setText(this.position, this.positionText());
    this.updateClock();
    setText(this.level, view.exact ? "Words: exact" : "Words: plain");
    this.level.setAttribute("aria-pressed", String(view.exact));
    const sentence = store.numSteps ? store.sentence(cursor.step) : this.nothingYet();
    if (sentence !== this.sentence.textContent) replace(this.sentence, withTerms(sentence));
    this.sentence.hidden = view.film.open; // it is the first scene
    this.numbers.hidden = !view.exact || !store.numSteps;
    if (!this.numbers.hidden) setText(this.numbers, numbersOf(store, cursor.step).join("; "));
    this.phases.update();
    const { classroom } = view, isLed = status.class?.role === "follower";
    this.follow.classList.toggle("wb-phone-fold", !live && !isLed); // the end of the slider
    this.follow.hidden = !store.numSteps || (isLed ? !classroom.isAway : cursor.follow);
    view.root.dataset.behind = String(!this.follow.hidden);
    setText(this.follow, isLed ? "Back to the teacher" : live ? "Follow" : "Go to end");
    this.message.hidden = !status.message || view.whatIf.tells(status.message);
    this.message.dataset.kind = status.kind || "problem";
    setText(this.message, status.message || "");
    this.reload.hidden = !view.connection.isBack;
  }

  nothingYet() {
    const { live, status: { state } } = this.view;
    if (!live) return "This trace has no steps.";
    if (state === "running") return "The first step is being computed.";
    if (!this.view.may("ask")) return "No steps yet.";
    return state === "paused" ? "No steps yet: press Run, or Step for one." : "No steps yet: ask the model something.";
  }

  badgeText() {
    const { store, cursor, status, live } = this.view;
    if (this.view.gone) return this.view.gone;
    if (!live) {
      const { source = "", is_simulated: isSimulated } = store.facts, name = source.split(", forked at step ")[0];
      const what = this.partWords() || (isSimulated ? "simulated" : "recording");
      return name === "simulation" && what === "simulated" ? name : `${plain(name || "recording", 30)} · ${what}`;
    }
    const [step, condition] = status.stopped_by || [];
    const stopped = status.state === "paused" && step === store.label(cursor.last);
    return `live · ${status.state || "recording"}${stopped ? `: ${plain(condition, 40)}` : ""}`;
  }

  /** The place of a part in its recording, or of what a run has kept; "" for a whole one. */
  partWords() {
    const { store } = this.view, { part } = store.facts;
    if (!part) return store.isPart ? `${heldOf(store)} of a longer run` : "";
    const { begin, end } = part, moment = (time) => timeWords(time, end - begin, (end - begin) / 10);
    const held = store.timed() ? `${moment(begin)} to ${moment(end)}` : heldOf(store);
    return `${held} of a recording of ${counted(part.num_steps, "step")}`;
  }

  positionText() {
    const { store, cursor, live } = this.view;
    if (!store.numSteps) return "no steps yet";
    const step = formatNumber(store.label(cursor.step)), last = formatNumber(store.label(cursor.last));
    if (!cursor.scrubbed) return `step ${step}`;
    if (live) return `viewing ${step}, engine at ${last}`;
    return `step ${step} of ${store.isPart ? `${formatNumber(store.label(0))}–${last}` : last}`;
  }

  /** The local time of day at which the step at the cursor began, of a run that knows it: an alert says 12:08. */
  updateClock() {
    const { store, cursor } = this.view, { created } = store.facts;
    this.clock.hidden = !created || !store.timed();
    if (this.clock.hidden) return;
    const moment = new Date((created + store.value("time", cursor.step)) * 1000);
    setText(this.clock, moment.toLocaleTimeString("en-GB"));
    this.clock.title = `The step began on ${moment.toLocaleDateString("en-CA")} at this local time`;
  }

  /** Tell the step at the cursor to screen readers, no more than about once a second. */
  announceStep() {
    const { store, cursor } = this.view, { step } = cursor;
    if (!store.numSteps || this.announced === step) return;
    this.announced = step;
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => setText(this.announcement, store.sentence(step)), 900);
  }
}

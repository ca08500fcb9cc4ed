// The view as a whole: builds the panels, takes in packets, and redraws once per animation frame.
// It speaks to its host only through a model with get / set / save_changes / on, as anywidget defines it; a saved
// page gives it a model that never changes.

import { ComparePanel } from "./compare.js";
import { Controls, bindKeys, keyList } from "./controls.js";
import { Cursor } from "./cursor.js";
import { h } from "./dom.js";
import { BlockTablesPanel } from "./block_tables.js";
import { EventsPanel } from "./events.js";
import { GanttPanel } from "./gantt.js";
import { KernelPanel } from "./kernel.js";
import { MetricsPanel } from "./metrics.js";
import { PackedPanel } from "./packed.js";
import { PoolPanel } from "./pool.js";
import { PhaseBox } from "./phase_box.js";
import { BreakpointsForm, ForkForm } from "./popovers.js";
import { RectanglePanel } from "./rectangle.js";
import { Store } from "./store.js";
import { STYLE } from "./style.js";
import { TextsPanel } from "./texts.js";
import { poolColumns, readableScale, tileKind } from "./geometry.js";
import { Theme, inkOn } from "./theme.js";
import { TimelinePanel } from "./timeline.js";
import { Tooltip } from "./tooltip.js";
import { WeightsPanel } from "./weights.js";

const PANELS = {
  timeline: TimelinePanel, gantt: GanttPanel, compare: ComparePanel, packed: PackedPanel, rectangle: RectanglePanel, weights: WeightsPanel, kernel: KernelPanel, texts: TextsPanel,
  pool: PoolPanel, tables: BlockTablesPanel, events: EventsPanel, metrics: MetricsPanel,
};
const AREAS = { wide: ["timeline", "gantt", "compare"], left: ["packed", "rectangle", "weights", "texts"], right: ["pool", "tables", "kernel", "events"], bottom: ["metrics"] };

class View {
  constructor(model, root) {
    Object.assign(this, { model, root });
    this.status = model.get("status") || {};
    this.options = model.get("options") || {};
    this.store = new Store();
    this.cursor = new Cursor(this.store, (what) => this.changed(what));
    this.theme = new Theme(this.options.theme || "auto");
    this.tooltip = new Tooltip();
    this.geometry = { poolColumns, readableScale, tileKind };
    this.cursor.live = this.live;
    this.commandCount = 0;
    this.controls = new Controls(this);
    const chosen = this.options.panels?.length ? this.options.panels : Object.keys(PANELS);
    this.panels = chosen.filter((id) => PANELS[id]).map((id) => new PANELS[id](this));
    const area = (name) => h("div", { class: `wb-area wb-${name}` }, AREAS[name].map((id) => this.panels.find((panel) => panel.id === id)?.element));
    this.helpElement = h("div", { class: "wb-popover", hidden: true, role: "dialog", "aria-label": "Keys" }, h("h3", {}, "Keys"), keyList());
    this.breakpointsForm = new BreakpointsForm(this);
    this.forkForm = new ForkForm(this);
    this.phaseBox = new PhaseBox(this);
    this.reading = h("p", { class: "wb-reading" }, "Colour is a request in focus. ", h("b", {}, "Solid"), " is prefill, ", h("b", {}, "light with a dot"), " is decode, ", h("b", {}, "hatched"), " is computed again.");
    this.controls.element.append(this.helpElement, this.breakpointsForm.element, this.forkForm.element);
    root.append(h("style", {}, STYLE), this.controls.element, this.phaseBox.element, area("wide"), this.reading, h("div", { class: "wb-columns" }, area("left"), area("right")), area("bottom"), this.tooltip.element);
    root.classList.add("wb-root");
    root.classList.toggle("wb-page", Boolean(this.options.page));
    root.tabIndex = -1;
    bindKeys(root, this);
    this.applyTheme();
    this.observe();
  }

  get live() { return Boolean(this.status.live); }

  ink(fill) { return inkOn(fill); }

  // -- the host ------------------------------------------------------------------------------------------------

  receive(packet) {
    if (!packet || !packet.byteLength) return;
    const before = this.store.numSteps, first = this.store.label(0);
    if (!this.store.append(packet)) return this.send("resend");
    const forgotten = before ? this.store.label(0) - first : 0;
    if (forgotten) {
      this.cursor.forget(forgotten);
      this.theme.forget();
    }
    if (this.store.requests.length) this.theme.focusFirst(this.store.requests);
    if (!this.mounted) {
      this.mounted = true;
      this.model.set("mounted", true);
      this.model.save_changes();
    }
    if (before === 0 && this.store.numSteps && !this.live && !this.status.watching) this.openRecording();
    if (forgotten) this.changed("data");
    if (this.store.numSteps !== before || forgotten) this.cursor.grown();
    else this.changed("data");
  }

  /** The second run of a comparison, whole. */
  receiveOther(packet) {
    if (!packet || !packet.byteLength) return;
    const other = new Store();
    if (!other.append(packet)) return;
    this.other = other;
    this.changed("data");
    const panel = this.panels.find((candidate) => candidate.id === "compare");
    if (panel) panel.element.hidden = false;
  }

  /** A recording opens on its first step that mixes prefill and decode: the picture that says most. */
  openRecording() {
    const { store, cursor } = this;
    cursor.follow = false;
    for (let step = 0; step < store.numSteps; step++) {
      if (store.value("decode_tokens", step) && store.value("prefill_tokens", step)) return void (cursor.step = step);
    }
  }

  /** Ask the host to do something; in a saved page nobody listens. */
  send(name, args = {}) {
    this.model.set("command", { id: ++this.commandCount, name, args });
    this.model.save_changes();
  }

  statusChanged() {
    const before = this.live;
    this.status = this.model.get("status") || {};
    this.cursor.live = this.live;
    this.changed(before === this.live ? "status" : "data");
  }

  // -- drawing -------------------------------------------------------------------------------------------------

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
    const { store, cursor } = this;
    if (this.controlsStale) {
      this.controlsStale = false;
      this.controls.update();
      this.breakpointsForm.update(this.status);
      this.phaseBox.update(this.status);
      if (store.numSteps && this.said !== cursor.step) {
        this.said = cursor.step;
        this.controls.say(`Step ${store.label(cursor.step)}: ${store.value("prefill_tokens", cursor.step)} prefill and ${store.value("decode_tokens", cursor.step)} decode tokens`);
      }
    }
    for (const panel of this.panels) panel.frame();
  }

  observe() {
    this.resizeObserver = new ResizeObserver(() => {
      this.root.dataset.narrow = String(this.root.clientWidth < 860);
      for (const panel of this.panels) panel.resized();
      this.requestFrame();
    });
    this.resizeObserver.observe(this.root);
    this.visibility = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const panel = this.panels.find((candidate) => candidate.element === entry.target);
        panel.visible = entry.isIntersecting;
      }
      this.requestFrame();
    }, { rootMargin: "200px" });
    for (const panel of this.panels) this.visibility.observe(panel.element);
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.mediaChanged = () => this.applyTheme();
    this.media.addEventListener("change", this.mediaChanged);
    this.themeObserver = new MutationObserver(() => this.applyTheme());
    this.themeObserver.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  }

  applyTheme() {
    this.theme.applyTo(this.root);
    this.theme.applyTo(this.tooltip.element);
    this.changed("theme");
  }

  nextTheme() {
    this.theme.next();
    this.applyTheme();
  }

  // -- focus and play ------------------------------------------------------------------------------------------

  toggleFocus(request) {
    if (!this.theme.toggle(request)) {
      this.say("Six requests are in focus already, one for each hue: take one out of focus first.");
    }
    this.changed("focus");
  }

  focusScheduled() {
    if (!this.store.numSteps) return;
    this.theme.focusOnly(this.store.chunks(this.cursor.step).map((chunk) => chunk.request));
    this.changed("focus");
  }

  startPlaying() {
    const started = performance.now(), from = this.cursor.step;
    const tick = () => {
      if (!this.cursor.playing) return;
      const target = from + ((performance.now() - started) / 1000) * this.cursor.speed;
      if (target >= this.cursor.last) {
        this.cursor.playing = false;
        this.cursor.seek(this.cursor.last);
        return;
      }
      if (Math.floor(target) !== this.cursor.step) this.cursor.seek(Math.floor(target), { keepFollow: true });
      requestAnimationFrame(tick);
    };
    tick();
  }

  // -- what keys do --------------------------------------------------------------------------------------------

  toggleHelp() { this.helpElement.hidden = !this.helpElement.hidden; }
  toggleTables() {
    const on = this.panels.some((panel) => !panel.asTable);
    for (const panel of this.panels) panel.showTable(on);
  }
  stepInto() {
    if (!this.can("step_into")) return this.say("Only a live engine's step can be stepped into.");
    if (this.status.state === "running") return this.say("The engine is running: pause it, then step into its next step.");
    this.send("step_into");
  }
  toggleBreakpoints() {
    if (!this.can("breakpoints")) return this.say("Breakpoints need a live engine: a recording can only be looked at.");
    this.breakpointsForm.element.hidden = !this.breakpointsForm.element.hidden;
  }
  toggleFork() {
    if (!this.can("fork")) return this.say("Only a live engine can be asked what would have been; compare two traces with other=.");
    if (this.forkForm.element.hidden) this.forkForm.open(); else this.forkForm.element.hidden = true;
  }
  toggleCompare() {
    if (!this.other) return this.toggleFork();
    const panel = this.panels.find((candidate) => candidate.id === "compare");
    if (panel) panel.element.hidden = !panel.element.hidden;
  }
  escape() {
    const open = [this.helpElement, this.breakpointsForm.element, this.forkForm.element].filter((element) => !element.hidden);
    if (open.length) for (const element of open) element.hidden = true;
    else this.cursor.toLive();
  }

  can(ability) { return this.live && (this.status.can || []).includes(ability); }

  /** Tell the person something; the next word from the host replaces it. */
  say(message) {
    this.status = { ...this.status, message };
    this.changed("step");
  }

  destroy() {
    this.cursor.playing = false;
    this.resizeObserver.disconnect();
    this.visibility.disconnect();
    this.themeObserver.disconnect();
    this.media.removeEventListener("change", this.mediaChanged);
    this.tooltip.element.remove();
    if (this.frameRequest) cancelAnimationFrame(this.frameRequest);
  }
}

export function render({ model, el }) {
  const root = h("div");
  el.append(root);
  const view = new View(model, root);
  const onPacket = () => view.receive(model.get("packet")), onStatus = () => view.statusChanged();
  model.on("change:packet", onPacket);
  model.on("change:status", onStatus);
  const onOther = () => view.receiveOther(model.get("other"));
  model.on("change:other", onOther);
  onPacket();
  onOther();
  // For tests and for people with a console: the state behind the picture.
  root.workbench = view;
  return () => {
    model.off("change:packet", onPacket);
    model.off("change:status", onStatus);
    model.off("change:other", onOther);
    view.destroy();
  };
}

export default { render };

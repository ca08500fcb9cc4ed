// Light or dark, and the colour of each request in focus. The colours come from workbench/viz/palette.py.

import { hueSlots, runTogether } from "./hues.js";

/** @type {any} */
const PALETTE = "__PALETTE__";

/** The theme of the page around the view: that of the notebook, the editor or the system. */
export function detectTheme() {
  const body = document.body, root = document.documentElement;
  const jupyter = body.dataset.jpThemeLight;
  if (jupyter) return jupyter === "false" ? "dark" : "light";
  const editor = body.dataset.vscodeThemeKind;
  if (editor) return /dark|high-contrast$/.test(editor) ? "dark" : "light";
  const page = root.dataset.theme || root.dataset.bsTheme;
  if (page) return /dark/.test(page) ? "dark" : "light";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** The slot of requests asked for in this view, whose hue no other request has. */
const OWN = PALETTE.focus.length;
const HUES = [...PALETTE.focus, PALETTE.own];

export class Theme {
  constructor(choice = "auto") {
    this.choice = choice; // "auto" | "light" | "dark"
    this.mixed = new Map();
    this.refresh();
    this.focus = new Map(); // request index -> hue slot
    this.automatic = true; // the requests of hues.js are in focus until a person chooses
    this.kept = new Map(); // id -> hue slot, of requests whose first steps have been forgotten
  }

  /** Look at the page again; panels ask for colours far too often to do so each time. */
  refresh() {
    this.name = this.choice === "auto" ? detectTheme() : this.choice;
    this.mixed.clear();
  }

  get colours() {
    return PALETTE[this.name];
  }

  next() {
    this.choice = this.name === "dark" ? "light" : "dark";
  }

  /** Set the colours as CSS variables of an element. */
  applyTo(element) {
    this.refresh();
    if (element.dataset.theme === this.name) return; // setting them again would cost a calculation of styles
    element.dataset.theme = this.name;
    for (const [role, colour] of Object.entries(this.colours)) element.style.setProperty(`--wb-${role}`, colour);
    element.style.colorScheme = this.name;
  }

  /** Put requests in focus as they begin to run, unless a person has chosen. */
  focusRunning(requests) {
    if (!this.automatic) return;
    const own = [...this.focus].filter(([, slot]) => slot === OWN);
    this.focus = new Map([...hueSlots(requests, PALETTE.focus.length, this.kept), ...own]);
  }

  /** The hue of a question of this view that no step has seen yet. */
  get ownHue() {
    return PALETTE.own;
  }

  /** Give a request the hue of this view's own. */
  claim(request) {
    this.focus.set(request.index, OWN);
  }

  /** The requests have changed: begin again, with the hues by id that are `kept`. */
  forget(kept = new Map()) {
    this.automatic = true;
    this.kept = kept;
    this.focus.clear();
  }

  /** The hue slots by id, without those of this view's own. */
  slotsById(requests) {
    return new Map([...this.focus].filter(([, slot]) => slot !== OWN).map(([i, slot]) => [requests[i].id, slot]));
  }

  focusOnly(requests) {
    this.automatic = false;
    const own = [...this.focus].filter(([, slot]) => slot === OWN), others = requests.filter(({ own }) => !own);
    this.focus = new Map(own);
    others.slice(0, PALETTE.focus.length).forEach(({ index }, slot) => this.focus.set(index, slot));
  }

  /**
   * Put one of the requests in focus, or take it out of focus.
   * @returns false when requests that run at the same time have all hues.
   */
  toggle(request, requests) {
    this.automatic = false;
    if (this.focus.delete(request.index)) return true;
    if (request.own) {
      this.claim(request);
      return true;
    }
    const beside = [...this.focus].filter(([index]) => runTogether(requests[index], request));
    const taken = new Set(beside.map(([, slot]) => slot));
    const slot = PALETTE.focus.findIndex((_, i) => !taken.has(i));
    if (slot < 0) return false;
    this.focus.set(request.index, slot);
    return true;
  }

  hue(index) {
    const slot = this.focus.get(index);
    return slot === undefined ? null : HUES[slot];
  }

  /** Solid colour, for the prefill tokens of a request. */
  prefill(index) {
    return this.hue(index) || this.colours.prefill;
  }

  /** Light colour, for the decode tokens of a request. */
  decode(index) {
    const hue = this.hue(index);
    if (!hue) return this.colours.decode;
    if (!this.mixed.has(hue)) this.mixed.set(hue, mix(hue, this.colours.background, 0.45));
    return this.mixed.get(hue);
  }

  fill(chunk) {
    return chunk.decode ? this.decode(chunk.request.index) : this.prefill(chunk.request.index);
  }

  /** Colour, letter and words of what a lane of a recorded kernel does. */
  action(name) {
    const [letter, colour, words] = PALETTE.actions[name];
    return { letter, colour: this.colours[colour] || colour, words };
  }

  event(kind) {
    const [shape, colour] = PALETTE.events[kind];
    return { shape, colour: this.name === "dark" ? mix(colour, "#FFFFFF", 0.35) : colour };
  }
}

/** The red, green and blue of a #RRGGBB colour, from 0 to 255. */
export function channels(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

/** An opaque mixture of two #RRGGBB colours; `share` is the part of the second. */
export function mix(colour, other, share) {
  const a = channels(colour), b = channels(other);
  return `#${a.map((v, i) => Math.round(v + (b[i] - v) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Relative luminance as WCAG 2 defines it. */
function luminance(colour) {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = channels(colour).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Dark or white text, whichever has more contrast on a fill (palette.ink_on). */
export function inkOn(colour) {
  if (!inks.has(colour)) inks.set(colour, contrasting(luminance(colour)));
  return inks.get(colour);
}

const inks = new Map(); // a picture asks for each of its cells

function contrasting(light) {
  return 1.05 / (light + 0.05) > (light + 0.05) / (luminance("#111418") + 0.05) ? "#FFFFFF" : "#111418";
}

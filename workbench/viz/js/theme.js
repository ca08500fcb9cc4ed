// Light or dark, and the colour of each request in focus. The colours come from workbench/viz/palette.py.

const PALETTE = __PALETTE__;

/** The theme of the page around us: a notebook's, an editor's, or the system's. */
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

export class Theme {
  constructor(choice = "auto") {
    this.choice = choice; // "auto" | "light" | "dark"
    this.mixed = new Map();
    this.refresh();
    this.focus = new Map(); // request index -> hue slot
    this.automatic = true;  // the first requests to arrive are in focus until a person chooses
  }

  /** Look at the page around us again; panels ask for colours far too often to do it each time. */
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

  /** Write the colours as CSS variables onto the root element of a view. */
  applyTo(element) {
    this.refresh();
    element.dataset.theme = this.name;
    for (const [role, colour] of Object.entries(this.colours)) element.style.setProperty(`--wb-${role}`, colour);
    element.style.colorScheme = this.name;
  }

  focusFirst(requests) {
    if (!this.automatic) return;
    for (const request of requests.slice(0, PALETTE.focus.length)) this.focus.set(request.index, request.index);
  }

  /** The requests are others now. */
  forget() {
    this.automatic = true;
    this.focus.clear();
  }

  focusOnly(requests) {
    this.automatic = false;
    this.focus.clear();
    requests.slice(0, PALETTE.focus.length).forEach((request, slot) => this.focus.set(request.index, slot));
  }

  /** Put a request in focus or out of it. Returns false when all six hues are taken. */
  toggle(request) {
    this.automatic = false;
    if (this.focus.delete(request.index)) return true;
    const taken = new Set(this.focus.values());
    const slot = PALETTE.focus.findIndex((_, i) => !taken.has(i));
    if (slot < 0) return false;
    this.focus.set(request.index, slot);
    return true;
  }

  hue(index) {
    const slot = this.focus.get(index);
    return slot === undefined ? null : PALETTE.focus[slot];
  }

  /** Filling of prefill tokens (solid) and of decodes (light) of a request. */
  prefill(index) {
    return this.hue(index) || this.colours.prefill;
  }

  decode(index) {
    const hue = this.hue(index);
    if (!hue) return this.colours.decode;
    if (!this.mixed.has(hue)) this.mixed.set(hue, mix(hue, this.colours.background, 0.45));
    return this.mixed.get(hue);
  }

  event(kind) {
    const [shape, colour] = PALETTE.events[kind];
    return { shape, colour: this.name === "dark" ? mix(colour, "#FFFFFF", 0.35) : colour };
  }
}

/** An opaque mixture of two #RRGGBB colours; `share` is the part of the second. */
export function mix(colour, other, share) {
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  return `#${[0, 1, 2].map((i) => Math.round(part(colour, i) + (part(other, i) - part(colour, i)) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Dark or white text, whichever stands out more on a filling (palette.ink_on). */
export function inkOn(colour) {
  const luminance = (text) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16) / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const light = luminance(colour);
  return 1.05 / (light + 0.05) > (light + 0.05) / (luminance("#111418") + 0.05) ? "#FFFFFF" : "#111418";
}

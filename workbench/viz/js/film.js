// A step explained in twenty seconds: its scenes one after the other, on one canvas, with their sentences. The canvas
// can be recorded by the browser as a WebM film for slides.

import { HIDDEN } from "./classroom.js";
import { formatNumber, h, offerFile, replace, setText } from "./dom.js";
import { FILM_FRAME, paintScene, PHONE_FRAME } from "./film_painter.js";
import { SCENES, scenesOf } from "./film_scenes.js";

/** Below this width of the canvas in pixels, the letters of the film's frame are too small. */
const NARROW = 600;

/** Seconds of a scene, and the part of it in which its marks appear. */
const SECONDS = 4, BUILDING = 0.7;

const FRAMES_PER_SECOND = 30;
const TYPES = ["video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm", "video/mp4"];

export class Film {
  constructor(view) {
    this.view = view;
    const button = (label, title, onclick) =>
      h("button", { class: "wb-button", type: "button", title, "aria-label": `${label}: ${title}`, onclick }, label);
    this.play = button("Pause", "Stop, or continue", () => this.toggle());
    this.play.removeAttribute("aria-label"); // its words change
    this.save = button(
      "Save film",
      "Record the five scenes as a WebM film, which takes twenty seconds",
      () => this.record(),
    );
    const close = button("Close", "Close the explanation", () => this.close());
    this.tabs = SCENES.map(([name, title], at) => {
      const props = { class: "wb-tab", type: "button", title, "aria-label": title, "data-scene": name };
      const number = h("span", { class: "wb-scene-number" }, at + 1), words = h("span", { class: "wb-scene" }, title);
      return h("button", { ...props, onclick: () => this.goTo(at) }, number, words);
    });
    this.title = h("strong", {});
    this.sentence = h("p", { class: "wb-film-sentence", role: "status" });
    this.canvas = h("canvas", {
      role: "img",
      tabindex: 0,
      class: "wb-film-canvas",
      "aria-label": "A step explained",
    });
    this.take(FILM_FRAME);
    const bar = h("div", { class: "wb-bar" }, this.title, this.play, this.save, close);
    const tabs = h("div", { class: "wb-tabs", role: "group", "aria-label": "Scenes" }, this.tabs);
    const stage = h("div", { class: "wb-film-stage" }, this.canvas, this.sentence);
    const props = { class: "wb-film", hidden: true, "aria-label": "A step explained" };
    this.element = h("section", props, bar, tabs, stage);
  }

  get open() {
    return !this.element.hidden;
  }

  /** Explain the step at the cursor, from its first scene. */
  show() {
    const { store, cursor } = this.view;
    if (!store.numSteps) return this.view.say("There is no step yet to explain.");
    if (this.view.classroom.hides) return this.view.say(HIDDEN);
    cursor.playing = false;
    if (this.element.hidden) this.view.inspector.pin(null); // its card would cover the scenes
    this.element.hidden = false;
    this.step = cursor.step;
    this.run = store.facts.run;
    this.scenes = scenesOf(store, this.step);
    setText(this.title, `Step ${formatNumber(store.label(this.step))} in five scenes`);
    this.playing = true;
    this.goTo(0);
    this.begin();
    this.view.changed("status");
    this.element.scrollIntoView?.({ block: "nearest" });
  }

  /** Close it; returns whether it was open. */
  close() {
    const { open } = this;
    this.playing = false;
    this.recorder?.stop();
    this.element.hidden = true;
    if (open) this.view.changed("status");
    return open;
  }

  /** The cursor has moved, or the theme has changed. */
  update() {
    if (!this.open) return;
    const { cursor, store } = this.view;
    if (!this.recorder && (cursor.step !== this.step || store.facts.run !== this.run)) this.show();
    else if (!this.playing) this.draw();
  }

  toggle() {
    if (!this.playing && this.time >= SECONDS * SCENES.length) this.time = 0;
    this.playing = !this.playing;
    this.begin();
  }

  /** Go to the beginning of a scene; while the film stands, to the complete scene. */
  goTo(scene) {
    this.time = (scene + (this.playing ? 0 : BUILDING)) * SECONDS;
    this.draw();
  }

  /** Let the time run, from where it is. */
  begin() {
    setText(this.play, this.playing ? "Pause" : "Play");
    if (!this.playing || this.ticking) return;
    let last = performance.now();
    const tick = () => {
      this.ticking = this.playing && this.open;
      if (!this.ticking) return setText(this.play, "Play");
      const now = performance.now();
      this.time = Math.min(this.time + (now - last) / 1000, SECONDS * SCENES.length);
      last = now;
      this.draw();
      if (this.time >= SECONDS * SCENES.length) this.playing = false;
      requestAnimationFrame(tick);
    };
    this.ticking = true;
    requestAnimationFrame(tick);
  }

  /** Record the film while it plays from its beginning, and offer it as a file. */
  record() {
    const type = TYPES.find((each) => globalThis.MediaRecorder?.isTypeSupported(each));
    if (!type || !this.canvas.captureStream) return this.view.say("This browser cannot record a film of a page.");
    this.take(FILM_FRAME); // a recorded film has one size
    const parts = [],
      recorder = this.recorder = new MediaRecorder(this.canvas.captureStream(FRAMES_PER_SECOND), {
        mimeType: type,
      });
    const label = this.view.store.label(this.step), end = type.includes("mp4") ? "mp4" : "webm";
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = () => {
      this.recorder = null;
      setText(this.save, "Save film");
      if (this.open) offerFile(new Blob(parts, { type }), `step-${label}.${end}`);
    };
    setText(this.save, "Recording…");
    this.playing = true;
    this.goTo(0);
    recorder.start();
    this.begin();
    const watch = setInterval(() => {
      if (this.playing && this.recorder) return;
      clearInterval(watch);
      if (recorder.state !== "inactive") setTimeout(() => recorder.stop(), 300);
    }, 100);
  }

  /** Give the canvas the size of a frame. */
  take(frame) {
    if (this.frame === frame) return;
    this.frame = frame;
    const { canvas } = this, { width, height, scale } = frame;
    Object.assign(canvas, { width: width * scale, height: height * scale });
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  /** Draw the scene of the present time; people who want no movement see each scene complete. */
  draw() {
    const at = Math.min(SCENES.length - 1, Math.floor(this.time / SECONDS)), scene = this.scenes[at];
    const still = globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches;
    const share = still ? 1 : Math.min(1, (this.time - at * SECONDS) / (SECONDS * BUILDING));
    this.tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === at)));
    if (this.sentence.textContent !== scene.sentence) replace(this.sentence, scene.sentence);
    this.canvas.setAttribute("aria-label", `${scene.title}. ${scene.sentence}`);
    const label = formatNumber(this.view.store.label(this.step));
    const title = `Step ${label}, ${at + 1} of ${SCENES.length}: ${scene.title}`;
    if (!this.recorder) {
      this.take(this.canvas.clientWidth && this.canvas.clientWidth < NARROW ? PHONE_FRAME : FILM_FRAME);
    }
    // A person reads the sentence below the canvas, and only a recorded film has it in the picture.
    const context = this.canvas.getContext("2d");
    paintScene(context, this.frame, this.view, scene, title, share, Boolean(this.recorder));
    this.sentence.classList.toggle("wb-announce", Boolean(this.recorder));
  }
}

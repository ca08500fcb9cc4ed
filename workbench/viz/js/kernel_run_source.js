// The source of a recorded kernel: its lines with the number of events, and the current one.

import { h, replace } from "./dom.js";
import { eventsPerLine } from "./kernel_run_marks.js";

export class SourcePanel {
  constructor(view) {
    this.view = view;
    this.file = "";
    this.pages = new Map(); // the lines of each text, and the element around them
    this.lineHeight = 0; // of every line in pixels, once there is one
    this.depth = Infinity; // of the calls: the line of the event itself
    this.calls = h("div", { class: "wb-kr-tabs", role: "group", "aria-label": "Calls" });
    this.sourceTabs = h("div", { class: "wb-kr-tabs", role: "tablist", "aria-label": "Texts of the kernel" });
    this.source = h("div", { class: "wb-kr-source", tabindex: 0, "aria-label": "Source" });
  }

  /** Show the line of an event, or of a call around it. */
  draw(event) {
    const { run } = this.view, place = run.lineAt(event, this.depth), lines = run.lines(event);
    const shown = Math.min(this.depth, lines.length - 1);
    const button = ({ file, line }, depth) => {
      const onclick = () => this.showDepth(depth === lines.length - 1 ? Infinity : depth);
      const props = { class: "wb-quiet", type: "button", "aria-pressed": String(depth === shown), onclick };
      return h("button", props, `${depth ? "› " : ""}${file}:${line}`);
    };
    const key = JSON.stringify([lines, shown]);
    if (this.callsShown !== key) replace(this.calls, lines.length > 1 ? lines.map(button) : "");
    this.callsShown = key;
    this.drawLine(place);
  }

  showDepth(depth) {
    this.depth = depth;
    this.view.drawNow();
  }

  drawLine(place) {
    const { texts } = this.view.run.header, files = Object.keys(texts).filter((file) => texts[file]);
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
      this.showText(texts[this.file]);
      this.currentLine?.classList.remove("wb-kr-current");
      this.currentLine = null;
    }
    const line = place.file === this.file ? this.lines[place.line - 1] : null;
    if (line === this.currentLine) return;
    this.currentLine?.classList.remove("wb-kr-current");
    this.currentLine = line;
    if (!line) return;
    line.classList.add("wb-kr-current");
    const { scrollTop, height } = this.view.room, top = (place.line - 1) * this.lineHeight;
    if (top < scrollTop || top + this.lineHeight > scrollTop + height) this.source.scrollTop = top - height / 3;
  }

  /** Show the lines of the file. They are made once, because playing goes from one file to another and back. */
  showText(text) {
    const known = this.pages.get(this.file);
    if (known) this.lines = known.lines;
    else {
      const counts = eventsPerLine(this.view.run, this.file), most = Math.max(1, ...counts.values());
      this.lines = text.split("\n").map((words, index) =>
        this.lineOf(words, index + 1, counts.get(index + 1) || 0, most)
      );
      const page = h("div", {}, this.lines);
      this.source.append(page);
      this.pages.set(this.file, { page, lines: this.lines });
    }
    for (const [file, { page }] of this.pages) page.hidden = file !== this.file;
    this.source.style.setProperty("--lines", this.lines.length);
    this.lineHeight ||= this.lines[0].offsetHeight;
  }

  lineOf(words, number, count, most) {
    const share = Math.round(100 * Math.sqrt(count / most));
    const props = { class: "wb-kr-line", style: `--share: ${share}%`, "data-line": number };
    return h(
      "div",
      count ? { ...props, class: "wb-kr-line wb-kr-used", onclick: () => this.toLine(number) } : props,
      h("span", { class: "wb-kr-number" }, String(number)),
      h("span", { class: "wb-kr-count", title: `${count} events` }, count ? compact(count) : ""),
      h("code", {}, words || " "),
    );
  }

  showFile(file) {
    this.file = file;
    this.follows = false;
    this.view.drawNow();
    this.follows = true;
  }

  /** The next instruction at a line, or the first one. */
  toLine(line) {
    const { file } = this, { view } = this, { run } = view;
    const at = (i) => run.place(run.first(i)).file === file && run.place(run.first(i)).line === line;
    for (let i = view.now + 1; i < run.size; i++) if (at(i)) return view.seek(i);
    for (let i = 0; i < run.size; i++) if (at(i)) return view.seek(i);
  }
}

const compact = (count) => count < 1000 ? String(count) : `${Math.round(count / 100) / 10}k`;

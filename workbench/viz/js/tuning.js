// The search for a setting that meets a target: the host simulates the run under many settings and answers with the
// one to take, those after it, and pictures of all of them.

import { counted, formatNumber, h, plain, replace, setText } from "./dom.js";
import { form, openBelow, place, popover, submitButton } from "./popovers.js";

const SEARCHING = "Simulating the run under other settings…";
const EXAMPLE = "ttft_p99=1s, itl_p99=100ms";

export class TuningForm {
  constructor(view) {
    this.view = view;
    this.slo = h("input", { type: "text", name: "slo", value: "ttft_p99=1s", size: 34, "aria-label": "Target" });
    this.verdict = h("p", { class: "wb-verdict", role: "status" });
    this.answer = h("div", { class: "wb-tuning" });
    const hint = `The same requests under other settings, with times predicted from this run. A target: ${EXAMPLE}.`;
    this.progress = h("progress", { hidden: true, "aria-label": "Settings simulated" });
    const end = { class: "wb-quiet", type: "button", hidden: true, onclick: () => this.view.send("end_tuning") };
    this.cancel = h("button", { ...end, title: "End the search with the best setting so far" }, "Cancel");
    const fields = [this.slo, submitButton("Find a setting"), this.progress, this.cancel];
    const search = form({ class: "wb-form" }, () => this.search(), fields);
    const head = h("p", { class: "wb-hint" }, hint);
    this.element = popover("Which setting?", head, search, this.verdict, this.answer);
  }

  open(button) {
    openBelow(this.element, button);
  }

  search() {
    this.asked = this.slo.value;
    this.view.send("tune", { slo: this.asked });
    setText(this.verdict, SEARCHING);
    replace(this.answer);
  }

  /** Show the progress of a search, and the button that ends it. */
  showProgress(tuning) {
    this.cancel.hidden = !tuning;
    const [done, all] = tuning ?? [0, 0];
    this.progress.hidden = !all;
    this.progress.max = all || 1;
    this.progress.value = done;
    if (all) setText(this.verdict, `${SEARCHING} ${formatNumber(done)} of ${counted(all, "setting")}.`);
  }

  /** Show the host's answer; see `tuning_facts` in pareto.py. */
  update({ tuned, tuning }) {
    if (tuning || !this.cancel.hidden) this.showProgress(tuning);
    if (!tuned && this.shown) replace(this.answer); // it was to another target
    if (!tuned) this.shown = null;
    if (!tuned || tuned === this.shown) return;
    this.shown = tuned;
    setText(this.verdict, plain(tuned.verdict, 900));
    const names = tuned.candidates.length ? Object.keys(tuned.candidates[0].values) : [];
    const columns = ["", "setting", ...names, "vLLM"].map((name) => h("th", { scope: "col" }, name));
    const rows = tuned.candidates.map(({ words, setting, values, flags }) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, words),
        h("td", {}, setting),
        names.map((name) => h("td", { "data-name": name }, values[name] ?? "–")),
        h("td", { "data-name": flags ? "vLLM" : null }, flags && h("code", {}, flags)),
      )
    );
    const pictures = (tuned.pictures ?? []).map((drawing) => {
      const src = `data:image/svg+xml,${encodeURIComponent(drawing)}`;
      return h("img", { src, style: `max-width: ${widthOf(drawing)}px`, alt: tuned.alt });
    });
    replace(
      this.answer,
      tuned.costs && h("p", { class: "wb-hint" }, tuned.costs),
      rows.length > 0 && h("table", {}, h("thead", {}, h("tr", {}, columns)), h("tbody", {}, rows)),
      tuned.losers && h("p", { class: "wb-hint" }, tuned.losers),
      pictures.length > 0 && h("div", { class: "wb-tuning-pictures" }, pictures),
      tuned.key && h("p", { class: "wb-hint" }, tuned.key),
      tuned.notes.map((note) => h("p", { class: "wb-hint" }, note)),
    );
    place(this.element);
  }
}

/** The width of a drawing in pixels, with letters of the size of other text. */
function widthOf(drawing) {
  return Number(/viewBox="0 0 ([\d.]+)/.exec(drawing)[1]);
}

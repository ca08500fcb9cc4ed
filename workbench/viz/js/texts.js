// The texts as they grow; every token knows the step that made it.

import { formatNumber, h, plain, replace, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { upperBound } from "./store.js";

const MOST_TOKENS = 600, PROMPT_CHARACTERS = 220, MOST_CARDS = 40;

/** The beginning and the end of a text: a chat template says the same at the beginning of every prompt. */
function bothEnds(text, limit) {
  const begin = Math.floor(limit / 3);
  return text.length > limit ? `${text.slice(0, begin)} … ${text.slice(begin - limit)}` : text;
}

export class TextsPanel extends Panel {
  constructor(view) {
    super(view, { id: "texts", title: "Texts", hint: "up to the cursor; hover a token for its step, click to go there" });
    this.list = h("div", { class: "wb-cards" });
    this.note = h("p", { class: "wb-note", hidden: true });
    this.body.append(this.list, this.note);
    this.cards = new Map();
    this.list.addEventListener("click", (event) => {
      const step = event.target.dataset?.step;
      if (step !== undefined) this.cursor.seek(Number(step));
    });
    this.list.addEventListener("pointerover", (event) => {
      const card = event.target.closest?.("[data-request]");
      const step = event.target.dataset?.step;
      if (!card) return;
      this.cursor.setHover({ request: Number(card.dataset.request), step: step === undefined ? undefined : Number(step) });
      if (step !== undefined) this.view.tooltip.show(event.clientX, event.clientY, [`token ${event.target.dataset.number} (id ${event.target.dataset.id})`, `made in step ${this.store.label(Number(step))}`]);
      else this.view.tooltip.hide();
    });
    this.list.addEventListener("pointerleave", () => {
      this.cursor.setHover({});
      this.view.tooltip.hide();
    });
  }

  render(stale) {
    const { store, cursor } = this, filter = cursor.filter.toLowerCase();
    if (stale.has("restart")) {
      this.cards.clear();
      replace(this.list);
    }
    const arrived = store.requests.filter((request) => (!filter || request.id.toLowerCase().includes(filter)) && store.stateOf(request, cursor.step) !== "");
    // The newest requests are the ones still growing; older ones stay one filter away.
    const shown = arrived.slice(-MOST_CARDS);
    const wanted = new Set(shown.map((request) => request.index));
    for (const [index, card] of this.cards) {
      if (wanted.has(index)) continue;
      card.element.remove();
      this.cards.delete(index);
    }
    for (const request of shown) {
      if (!this.cards.has(request.index)) {
        const card = this.makeCard(request);
        this.cards.set(request.index, card);
        const after = shown.find((other) => other.index > request.index && this.cards.has(other.index));
        this.list.insertBefore(card.element, after ? this.cards.get(after.index).element : null);
      }
      this.fill(this.cards.get(request.index), request);
    }
    this.note.hidden = arrived.length <= shown.length;
    setText(this.note, `${formatNumber(arrived.length - shown.length)} earlier requests are not shown: filter by id to see them.`);
  }

  makeCard(request) {
    const chip = h("button", { class: "wb-chip", title: "Put in focus, or out of it", onclick: () => this.view.toggleFocus(request) }, h("i"), h("bdi", {}, plain(request.id)));
    const state = h("span", { class: "wb-state" });
    const abort = h("button", { class: "wb-quiet", title: `Abort ${plain(request.id)}`, onclick: () => this.view.send("abort", { request_id: request.id }) }, "Abort");
    const prompt = h("bdi", { class: "wb-prompt" }, request.prompt ? bothEnds(request.prompt, PROMPT_CHARACTERS) : `${formatNumber(request.num_prompt_tokens)} prompt tokens`);
    const output = h("bdi", { class: "wb-output" });
    const element = h("article", { class: "wb-card", "data-request": request.index, "aria-label": `Request ${plain(request.id)}` },
      h("header", {}, chip, state, abort), prompt, output);
    return { element, chip, state, abort, output, first: 0, count: 0 };
  }

  fill(card, request) {
    const { store, cursor, theme } = this;
    const state = store.stateOf(request, cursor.step), last = store.lastChunk(request, cursor.step);
    const count = upperBound(request.tokens, cursor.step, (token) => token.step);
    const kv = last >= 0 ? store.chunk(request.chunks[last]).end : 0;
    const progress = { waiting: "waiting", preempted: "preempted, waits to be computed again", aborted: "aborted", finished: `finished: ${plain(request.finishReason)}` }[state]
      || (count ? "decoding" : `prefilling ${formatNumber(kv)} of ${formatNumber(request.num_prompt_tokens)}`);
    setText(card.state, `${progress} · ${formatNumber(count)} of ${formatNumber(request.max_tokens)} tokens`);
    card.abort.hidden = !this.view.live || state === "finished" || state === "aborted";
    const hue = theme.hue(request.index);
    card.chip.style.setProperty("--wb-hue", hue || theme.colours.owned);
    card.chip.setAttribute("aria-pressed", String(Boolean(hue)));
    const first = Math.max(0, count - MOST_TOKENS);
    if (first !== card.first || count < card.count) {
      replace(card.output, first > 0 ? "… " : null);
      card.first = card.count = first;
    }
    // Ids stand in for text only where a trace has no text at all: a token without any, such as an end token, is silent.
    const silent = Boolean(request.prompt) || request.tokens.some((token) => token.text);
    for (let i = card.count; i < count; i++) {
      const token = request.tokens[i];
      card.output.append(h("span", { "data-step": token.step, "data-number": i, "data-id": token.id }, token.text || (silent ? "" : `${token.id} `)));
    }
    card.count = Math.max(card.count, count);
    if (card.mark !== undefined && card.marked) card.marked.removeAttribute("class");
    const newest = card.output.lastElementChild;
    card.marked = newest && Number(newest.dataset.step) === cursor.step ? newest : null;
    card.mark = cursor.step;
    if (card.marked) card.marked.className = "wb-now";
    card.output.scrollTop = card.output.scrollHeight;
  }

  tableTwin() {
    const { store, cursor } = this;
    return {
      caption: `Texts at step ${store.label(cursor.step)}`, headings: ["request", "state", "tokens", "text"],
      rows: store.requests.filter((request) => store.stateOf(request, cursor.step)).map((request) => {
        const count = upperBound(request.tokens, cursor.step, (token) => token.step);
        return [plain(request.id), store.stateOf(request, cursor.step), count, request.tokens.slice(0, count).map((token) => token.text || `${token.id} `).join("")];
      }),
    };
  }
}

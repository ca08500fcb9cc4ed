// The texts as they grow; every token knows the step in which it was sampled.

import { candidateBars } from "./candidates.js";
import { counted, formatNumber, h, plain, replace, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { nameOf } from "./request.js";

const MOST_TOKENS = 600, PROMPT_CHARACTERS = 180, MOST_CARDS = 40;

/** The beginning and the end of a text. */
function bothEnds(text, limit) {
  const begin = Math.floor(limit / 3);
  return text.length > limit ? `${text.slice(0, begin)} … ${text.slice(begin - limit)}` : text;
}

/** A person's words in common chat templates. */
const TURNS = [
  /<\|im_start\|>user\n([\s\S]*?)<\|im_end\|>/g,
  /<start_of_turn>user\n([\s\S]*?)<end_of_turn>/g,
  /<\|start_header_id\|>user<\|end_header_id\|>\s*([\s\S]*?)<\|eot_id\|>/g,
  /\[INST\]([\s\S]*?)\[\/INST\]/g,
];

/** The last words of a person in a prompt, without its chat template; all of a prompt without one. */
function ownWords(prompt) {
  for (const turn of TURNS) {
    const found = [...prompt.matchAll(turn)].at(-1);
    if (found?.[1].trim()) return found[1].trim();
  }
  return prompt;
}

export class TextsPanel extends Panel {
  constructor(view) {
    super(view, {
      id: "texts",
      title: "Texts",
      hint: "up to the cursor; click a token to go to its step",
    });
    this.list = h("div", { class: "wb-cards", tabindex: 0, role: "group", "aria-label": "Requests and their texts" });
    this.note = h("p", { class: "wb-note", hidden: true });
    this.body.append(this.list, this.note);
    this.cards = new Map(); // request -> card
    this.pointed = null; // the card that was pointed at last
    this.list.addEventListener("click", (event) => {
      const target = this.tokenUnder(event), { step, number } = target.dataset, card = target.closest("[data-request]");
      if (step === undefined || !card) return;
      this.cursor.seek(Number(step));
      view.inspector.pin({ kind: "token", request: Number(card.dataset.request), number: Number(number) });
    });
    this.list.addEventListener("pointerover", (event) => this.hovered(event));
    this.list.addEventListener("pointerleave", () => {
      this.cursor.setHover({});
      this.view.tooltip.hide();
    });
  }

  /** The element under the pointer. The tokens of a card get theirs when it is pointed at for the first time. */
  tokenUnder({ target, clientX, clientY, buttons }) {
    const index = target.closest("[data-request]")?.dataset.request, request = this.store.requests[index];
    const card = this.cards.get(request);
    if (!card || card === this.pointed || buttons) return target; // while a button is held, a text is being selected
    this.pointed = card;
    this.fill(card, request);
    return this.list.getRootNode().elementFromPoint(clientX, clientY) ?? target;
  }

  hovered(event) {
    const { clientX, clientY, buttons } = event, target = this.tokenUnder(event);
    const card = target.closest("[data-request]"), { number, id } = target.dataset;
    if (!card) return;
    const request = Number(card.dataset.request);
    if (target.dataset.step === undefined) {
      this.cursor.setHover({ request });
      this.view.tooltip.hide();
      return;
    }
    const step = Number(target.dataset.step);
    this.cursor.setHover({ request, step });
    const lines = [
      `token ${formatNumber(this.store.tokenNumber(this.store.requests[request], Number(number)))} (${
        this.store.idWords(id)
      })`,
      `sampled in step ${this.store.label(step)}`,
    ];
    const { tokens } = this.store.requests[request];
    const together = tokens.filter((token) => token.chunk === tokens[number].chunk);
    if (together.length > 1) {
      const drafts = counted(together.length - 1, "accepted draft");
      lines.push(`with ${drafts} and the token after: ids ${together.map((token) => token.id).join(" ")}`);
    }
    const top = this.store.topTokens(this.store.requests[request], Number(number));
    this.view.tooltip.show({ clientX, clientY, target, buttons }, lines, top ? candidateBars(top) : []);
  }

  /** Number of tokens of a request at the cursor, of those that are here. */
  numHere(request) {
    return this.store.numHere(request, this.cursor.step);
  }

  render() {
    const { store, cursor } = this;
    const arrived = store.requests.filter((request) => {
      return cursor.matches(request) && store.stateOf(request, cursor.step) !== "";
    });
    // The newest requests are the ones still growing; older ones can be found by the filter.
    const shown = arrived.slice(-MOST_CARDS), wanted = new Set(shown);
    for (const [request, card] of this.cards) {
      if (wanted.has(request)) continue;
      card.element.remove();
      this.cards.delete(request);
    }
    for (const request of shown) {
      if (!this.cards.has(request)) this.insertCard(request, shown);
      this.fill(this.cards.get(request), request);
    }
    this.showQueued();
    this.note.hidden = arrived.length <= shown.length;
    const earlier = formatNumber(arrived.length - shown.length);
    setText(this.note, `${earlier} earlier requests are not shown: filter by id to see them.`);
  }

  /** Questions that the engine has taken and that no step has seen yet, each with the colour that it will get. */
  showQueued() {
    const { theme } = this, { queued } = this.view.question;
    const signature = JSON.stringify([queued, theme.name]);
    if (signature === this.queuedAre) return;
    this.queuedAre = signature;
    for (const element of this.list.querySelectorAll("[data-queued]")) element.remove();
    for (const [id, prompt] of queued) {
      const hue = `--wb-hue:${theme.ownHue}`,
        name = h("span", { class: "wb-chip" }, h("i"), nameOf({ id, own: true }));
      const head = h("header", {}, name, h("span", { class: "wb-state" }, "queued"));
      const text = h("bdi", { class: "wb-prompt" }, bothEnds(prompt, PROMPT_CHARACTERS));
      this.list.append(h("article", { class: "wb-card", "data-queued": "true", style: hue }, head, text));
    }
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** Insert the card of a request before that of the next request that has one. */
  insertCard(request, shown) {
    const card = this.makeCard(request);
    this.cards.set(request, card);
    const after = shown.find((other) => other.index > request.index && this.cards.has(other));
    const queued = this.list.querySelector("[data-queued]");
    this.list.insertBefore(card.element, after ? this.cards.get(after).element : queued);
  }

  makeCard(request) {
    const id = plain(request.id), { view } = this;
    const abort = () => view.send("abort", { request_id: request.id });
    const swatch = `Colour of ${id}: put it in focus, or take it out of focus`;
    const chip = h("button", {
      class: "wb-chip wb-swatch-button",
      title: swatch,
      "aria-label": swatch,
      onclick: () => view.toggleFocus(request),
    }, h("i"));
    const pin = () => view.inspector.pin({ kind: "request", request: request.index });
    const name = h("button", { class: "wb-chip", title: `Show what ${id} did`, onclick: pin }, h("bdi", {}));
    const state = h("span", { class: "wb-state" });
    const abortButton = h("button", { class: "wb-quiet", title: `Abort ${id}`, onclick: abort }, "Abort");
    const prompt = this.promptElement(request);
    const output = h("bdi", { class: "wb-output" });
    const element = h(
      "article",
      { class: "wb-card", "data-request": request.index, "aria-label": `Request ${id}` },
      h("header", {}, chip, name, state, abortButton),
      prompt,
      output,
    );
    // The output holds the tokens [first, count): each in an element, or all but the newest as one text.
    return {
      element,
      chip,
      name: name.firstChild,
      state,
      abort: abortButton,
      output,
      first: 0,
      count: 0,
      isCut: false,
      byToken: false,
      marked: null,
    };
  }

  /** The prompt, shortened in the middle; a press shows all of it. */
  promptElement(request) {
    const { prompt, prompt_length: length = 0 } = request, own = ownWords(prompt);
    if (!prompt) return h("bdi", { class: "wb-prompt" }, counted(request.num_prompt_tokens, "prompt token"));
    const shown = bothEnds(own, PROMPT_CHARACTERS), more = shown === own ? "show template" : "show all";
    const text = h("bdi", {}, shown), element = h("div", { class: "wb-prompt" }, text);
    if (shown === prompt && length <= prompt.length) return element;
    let whole = false;
    const rest = length > prompt.length ? ` … (${formatNumber(length - prompt.length)} more characters)` : "";
    const toggle = () => {
      whole = !whole;
      setText(text, whole ? prompt + rest : shown);
      setText(button, whole ? "show less" : more);
      button.setAttribute("aria-expanded", String(whole));
    };
    const props = { class: "wb-link", type: "button", "aria-expanded": "false", onclick: toggle };
    const button = h("button", props, more);
    element.append(" ", button);
    return element;
  }

  fill(card, request) {
    const { store, cursor, theme } = this, state = store.stateOf(request, cursor.step), count = this.numHere(request);
    setText(card.name, nameOf(request));
    setText(card.state, `${this.progress(request, state)} · ${store.outputOf(request, cursor.step)} tokens`);
    // At the newest step, not at the cursor: a request that has ended cannot be aborted any more.
    const newest = store.stateOf(request, cursor.last);
    card.abort.hidden = !this.view.may("control") || newest === "finished" || newest === "aborted";
    const hue = theme.hue(request.index);
    card.element.style.setProperty("--wb-hue", hue || theme.colours.owned);
    card.chip.setAttribute("aria-pressed", String(Boolean(hue)));
    this.fillOutput(card, request, count);
    card.marked?.removeAttribute("class");
    let token = card.output.lastElementChild;
    // The text of several tokens of a step is that of the first one.
    while (token && !token.textContent && token.previousElementSibling?.dataset.step === token.dataset.step) {
      token = token.previousElementSibling;
    }
    card.marked = token && Number(token.dataset.step) === cursor.step ? token : null;
    if (card.marked) card.marked.className = "wb-now";
  }

  progress(request, state) {
    const { store, cursor } = this;
    if (state === "waiting" || state === "aborted") return state;
    if (state === "preempted") return "preempted, waiting to be recomputed";
    if (state === "finished") return plain(store.finishWords(request));
    if (store.numOutput(request, cursor.step)) return "decoding";
    const computed = store.numComputed(request, cursor.step);
    return `prefilling ${formatNumber(computed)} of ${formatNumber(request.num_prompt_tokens)}`;
  }

  /**
   * Append the tokens up to `count`, or begin again when earlier ones have to go. Elements for all tokens in sight
   * take most of the time of a move through a long run, so a card has them once it is pointed at, or if drafts are to
   * be told from other tokens.
   */
  fillOutput(card, request, count) {
    const first = Math.max(0, count - MOST_TOKENS),
      isCut = first > 0 || request.numBefore > 0,
      again = first !== card.first || count < card.count || isCut !== card.isCut;
    const byToken = card === this.pointed || this.store.hasDrafts || (card.byToken && !again);
    if (!again && count === card.count && byToken === card.byToken) return;
    if (again || !byToken || !card.byToken) {
      card.count = byToken ? first : Math.max(first, count - 1);
      replace(card.output, (isCut ? "… " : "") + this.words(request, first, card.count) || null);
    }
    for (; card.count < count; card.count++) {
      const { step, id, drafted } = request.tokens[card.count], number = card.count;
      const props = { "data-step": step, "data-number": number, "data-id": id, "data-drafted": drafted && "true" };
      card.output.append(h("span", props, this.words(request, number, number + 1)));
    }
    Object.assign(card, { first, byToken, isCut });
  }

  /**
   * The text of the tokens [from, to), or their ids if a request has no text at all, or a dot for each unknown one.
   * Spaces and line breaks at the beginning of a reply are left out: they would only move it.
   */
  words(request, from, to) {
    // A token without text, such as an end token, adds none.
    const { tokensKnown } = this.store, first = request.tokens.findIndex(({ text }) => text?.trim());
    const written = (text, i) => first < 0 || i < first ? "" : i === first ? text.trimStart() : text;
    const word = ({ text, id }, i) =>
      text ? written(text, from + i) : request.hasText ? "" : tokensKnown ? `${id} ` : "· ";
    return request.tokens.slice(from, to).map(word).join("");
  }

  tableData() {
    const { store, cursor } = this;
    const cells = (request) => {
      const count = store.numOutput(request, cursor.step) ?? "–", state = store.stateOf(request, cursor.step);
      const text = this.words(request, 0, this.numHere(request));
      return [nameOf(request), state, count, request.numBefore ? `… ${text}` : text];
    };
    return {
      caption: `Texts at step ${store.label(cursor.step)}`,
      headings: ["request", "state", "tokens", "text"],
      rows: store.requests.filter((request) => store.stateOf(request, cursor.step)).map(cells),
    };
  }
}

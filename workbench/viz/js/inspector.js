// The drawer with one pinned object: a request, a KV block or an output token. Its facts are those of the step at the
// cursor, and each of them leads on: request → chunk → block → text → why.

import { holdersOf, listed, originOf } from "./block_holders.js";
import { candidateBars } from "./candidates.js";
import { counted, formatNumber, formatRange, h, plain, replace } from "./dom.js";
import { explanation } from "./explanation.js";
import { CACHED, FREE, OWNED } from "./pool_history.js";
import { close } from "./popovers.js";
import { nameOf } from "./request.js";
import { draftsOf, groupOf, kvOf, limitOf, roleOf } from "./words.js";

/** Words for the states of a request. */
const STATE_NAMES = {
  waiting: "waiting",
  running: "running",
  preempted: "preempted, waiting to be recomputed",
  finished: "finished",
  aborted: "aborted",
  "": "not arrived yet",
};

export class Inspector {
  constructor(view) {
    this.view = view;
    this.pinned = null;
    this.title = h("h3", { tabindex: -1 });
    this.facts = h("dl", { class: "wb-pinned" });
    const close = h("button", { class: "wb-quiet", type: "button", onclick: () => this.pin(null) }, "Close");
    const head = h("header", {}, h("i", { class: "wb-swatch" }), this.title, h("span", { class: "wb-space" }), close);
    this.swatch = head.firstChild;
    this.why = h("div", {});
    this.element = h("aside", { class: "wb-drawer", hidden: true, "aria-label": "Pinned" }, head, this.facts, this.why);
  }

  /**
   * Pin an object: { kind: "request", request }, { kind: "block", block, position? } or
   * { kind: "token", request, number }, where `request` is the index of a request; null closes the drawer. A narrow
   * screen has room for one box, so that a card closes the dialogs. One that a key opens takes the focus, and gives it
   * back when it closes.
   */
  pin(what) {
    const active = this.view.root.getRootNode().activeElement, isInside = this.element.contains(active);
    const byKey = this.view.root.contains(active) && active.matches(":focus-visible");
    this.takesFocus = Boolean(what) && byKey;
    if (this.takesFocus && !isInside) this.opener = active;
    if (!what && isInside) this.opener?.focus({ preventScroll: true });
    if (!what) this.opener = null;
    this.pinned = what;
    if (what && this.view.root.dataset.narrow === "true") this.view.popovers.forEach(close);
    this.view.changed("pin");
  }

  update() {
    const { pinned, view } = this;
    this.element.hidden = !pinned || !view.store.numSteps;
    if (this.element.hidden) return;
    this.updateWhy();
    const known = pinned.request === undefined || pinned.request < view.store.requests.length;
    const { title, rows, request } = known ? this[pinned.kind](pinned) : { title: "It is no longer here.", rows: [] };
    const signature = JSON.stringify([title, rows, view.theme.name, view.theme.hue(request?.index)]);
    if (signature !== this.signature) this.show(signature, title, rows, request);
    this.takeFocus();
  }

  /** Write the facts of the card. */
  show(signature, title, rows, request) {
    const { view } = this;
    this.signature = signature;
    this.title.textContent = title;
    this.swatch.hidden = !request;
    if (request) this.swatch.style.setProperty("--wb-hue", view.theme.hue(request.index) || view.theme.colours.owned);
    replace(
      this.facts,
      rows.map(([name, parts]) => [h("dt", {}, name), h("dd", {}, [parts].flat().map(this.elementOf))]),
    );
  }

  /** Give the focus to a card that a key has opened, so that a screen reader reads it. */
  takeFocus() {
    if (this.takesFocus) this.title.focus({ preventScroll: true });
    this.takesFocus = false;
  }

  /** Below a request: a button that asks the host why it took so long, then the answer; a saved page may hold it. */
  updateWhy() {
    const { pinned, view } = this, { explains, explained, explanations } = view.status;
    const asks = explains || explanations;
    const request = pinned.kind === "request" && asks ? view.store.requests[pinned.request] : undefined;
    const answer = request && (explained?.request === request.id ? explained : explanations?.[request.id]);
    const state = answer || (request ? `${request.id} ${this.askedFor === request.id}` : "");
    if (state === this.shownWhy) return;
    this.shownWhy = state;
    if (answer) replace(this.why, explanation(view, answer, this));
    else if (!request) replace(this.why);
    else if (!explains) {
      const command = h("code", {}, `workbench trace explain TRACE ${plain(request.id)}`);
      replace(this.why, h("p", { class: "wb-hint" }, "Why so long? This page does not say. Run: ", command));
    } else if (this.askedFor === request.id) {
      replace(this.why, h("p", { class: "wb-hint" }, "Simulating without its cause…"));
    } else {
      const ask = () => {
        this.askedFor = request.id;
        view.send("explain", { request_id: request.id });
        view.changed("pin");
      };
      replace(this.why, h("button", { class: "wb-button", type: "button", onclick: ask }, "Why so long?"));
    }
  }

  /** A part of a fact: text, an element, or { words, go } as a link. @param {any} part */
  elementOf = (part) => {
    if (part?.nodeType) return part;
    if (!part?.go) return String(part?.words ?? part);
    return h("button", { class: "wb-link", type: "button", onclick: part.go }, part.words);
  };

  // -- links -----------------------------------------------------------------------------------------------------

  toStep(step, words) {
    const label = this.view.store.label(step);
    return { words: words ?? `step ${formatNumber(label)}`, to: label, go: () => this.view.cursor.seek(step) };
  }

  toRequest(request) {
    const go = () => this.pin({ kind: "request", request: request.index });
    return { words: nameOf(request), to: request.id, go };
  }

  toBlock(block, request) {
    return {
      words: `block ${block}`,
      to: block,
      go: () => this.pin({ kind: "block", block, request: request?.index }),
    };
  }

  toToken(request, number) {
    return {
      words: this.tokenWords(request, number, 24),
      to: number,
      go: () => this.pin({ kind: "token", request: request.index, number }),
    };
  }

  /** The text of a token in quotes; what stands for a missing one has none, because it is not text. */
  tokenWords(request, number, limit) {
    const words = plain(this.view.store.tokenText(request, number), limit);
    return request.tokens[number].text ? JSON.stringify(words) : words;
  }

  // -- the facts -------------------------------------------------------------------------------------------------

  request({ request: index }) {
    const { store, cursor } = this.view, { step } = cursor, request = store.requests[index];
    const state = store.stateOf(request, step),
      chunk = store.chunkIn(request, step),
      count = store.numHere(request, step);
    const rows = [["state", STATE_NAMES[state] ?? state]];
    const prompt = counted(request.num_prompt_tokens, "prompt token");
    const output = store.numOutput(request, step), of = output === null ? "" : `${formatNumber(output)} of `;
    rows.push(["size", `${prompt}, ${of}up to ${counted(request.max_tokens, "output token")}`]);
    if (request.adapter) rows.push(["adapter", plain(request.adapter)]);
    if (chunk) {
      rows.push(["this step", `${roleOf(chunk)}: ${counted(chunk.n, "token")}, ${kvOf(chunk)}`]);
      rows.push(["why not more", limitOf(chunk)]);
      if (chunk.drafts) rows.push(["drafts", draftsOf(chunk)]);
      if (chunk.cached) rows.push(["prefix cache", `${counted(chunk.cached, "token")} found`]);
      if (chunk.miss) rows.push(["not found", plain(chunk.miss, 160)]);
    } else if (state === "waiting" || state === "preempted") {
      rows.push(["why not in this step", plain(store.whyNot(request, step), 200) || "–"]);
    } else if (state === "finished") rows.push(["end", store.finishWords(request)]);
    const blocks = store.blockTable(request, step);
    if (blocks.length) {
      const shown = blocks.filter((block) => block).slice(0, 6).flatMap((block) => [this.toBlock(block, request), " "]);
      rows.push([counted(blocks.length, "KV block"), blocks.length > 6 ? [shown, "…"].flat() : shown]);
    }
    const steps = request.chunkSteps;
    if (steps.length) {
      rows.push(["scheduled in", [
        counted(steps.length, "step"),
        store.isPart ? " of this part: from " : ": from ",
        this.toStep(steps[0]),
        " to ",
        this.toStep(steps.at(-1)),
      ]]);
    }
    if (count) rows.push(["newest token", this.toToken(request, count - 1)]);
    return { title: nameOf(request), rows, request };
  }

  block({ block, position }) {
    const { store, cursor } = this.view, { step } = cursor, pool = store.pool.at(step), size = store.facts.block_size;
    if (block === 0) return { title: "KV block 0", rows: [["state", "reserved, never handed out"]] };
    const owned = pool.state[block] === OWNED, owner = owned ? store.requests[pool.owner[block]] : undefined;
    const names = { [FREE]: "free", [OWNED]: "in use" };
    const rows = [["state", names[pool.state[block]] || "cached: a request with the same beginning can still hit it"]];
    if (owner) {
      const holders = holdersOf(store, block, step), name = holders.length > 1 ? "owners" : "owner";
      rows.push([name, listed(holders, (request) => this.toRequest(request))]);
      const place = store.blocksByGroup(step).places.get(block), group = place && store.groups[place.group];
      if (store.groups.length > 1 && place) rows.push(["group", `${place.group}: ${groupOf(group)}`]);
      if (group?.kind === "mamba") rows.push(["state slot", formatNumber(place.logical)]);
      else if (place) this.contents(rows, owner, place.logical, group.block_size, step);
    } else if (pool.state[block] === CACHED) this.origin(rows, originOf(store, block, step));
    if (position !== undefined) rows.push(["token", `${formatNumber(position)}, slot ${position % size} of ${size}`]);
    if (pool.changed[block] >= 0) rows.push(["last change", this.toStep(pool.changed[block])]);
    return { title: `KV block ${block}`, rows, request: owner };
  }

  /** Of a cached block the request that wrote it, its positions and their text. */
  origin(rows, origin) {
    if (!origin) return;
    const { request, group: index, logical, from } = origin, { groups } = this.view.store, group = groups[index];
    const since = from === undefined ? [] : [" from ", this.toStep(from)];
    rows.push([from === undefined ? "last owner" : "written by", [this.toRequest(request), ...since]]);
    if (groups.length > 1) rows.push(["group", `${index}: ${groupOf(group)}`]);
    if (group.kind === "mamba") return rows.push(["state slot", formatNumber(logical)]);
    const first = logical * group.block_size, end = first + group.block_size, text = this.textOf(request, first, end);
    rows.push(["KV positions", formatRange(first, end)]);
    if (text) rows.push(["text", text]);
  }

  /** The positions of a block, the step that wrote them, and the output tokens among them. */
  contents(rows, owner, logical, size, step) {
    const { store } = this.view, from = logical * size, to = Math.min(from + size, store.numComputed(owner, step));
    rows.push([
      "KV positions",
      `${formatRange(from, from + size)}, ${formatNumber(Math.max(0, to - from))} of ${size} filled`,
    ]);
    const found = store.stepThatComputed(owner, from, step);
    // A later step computed it again, after a preemption: what is here now was written before the steps that are here.
    if (found && (found.step <= step || !store.isPart)) {
      const words = found.cached ? "found in the prefix cache in " : "written from ";
      rows.push(["contents", [words, this.toStep(found.step)]]);
    }
    const text = this.textOf(owner, from, to);
    if (text) rows.push(["text", text]);
  }

  /** The text of the positions [from, to) of a request: prompt tokens, then output tokens, some of them gone. */
  textOf(owner, from, to) {
    const { store } = this.view, begin = Math.max(from, owner.num_prompt_tokens);
    if (begin >= to) return to > from ? "part of the prompt" : "";
    const parts = begin > from ? [counted(begin - from, "prompt token")] : [], output = [];
    let hasText = false, gone = 0;
    for (let at = begin; at < to; at++) {
      const index = store.tokenAt(owner, at);
      if (index < 0) gone++;
      else if (index < owner.tokens.length) {
        output.push(store.tokenText(owner, index));
        hasText ||= Boolean(owner.tokens[index].text);
      }
    }
    if (gone) parts.push(`${counted(gone, "output token")} of earlier steps`);
    const text = plain(hasText || store.tokensKnown ? output.join("") : "not recorded", 80);
    if (output.length) parts.push(hasText ? JSON.stringify(text) : text);
    return parts.join(", then ");
  }

  token({ request: index, number }) {
    const { store } = this.view, request = store.requests[index], token = request.tokens[number];
    if (!token) return { title: "This token is no longer here.", rows: [] };
    const position = store.tokenPosition(request, number), chunk = store.chunk(token.chunk);
    /** @type {any[][]} */
    const rows = [
      ["of", this.toRequest(request)],
      ["sampled in", this.toStep(token.step)],
      [
        "place",
        `output token ${formatNumber(store.tokenNumber(request, number))}, position ${formatNumber(position)}, ${
          store.idWords(token.id)
        }`,
      ],
      ["by", `${roleOf(chunk)}, ${kvOf(chunk)}`],
    ];
    const found = store.stepThatComputed(request, position, this.view.cursor.last);
    if (found && store.facts.block_size) {
      const block = store.blockTable(request, found.step)[Math.floor(position / store.facts.block_size)];
      if (block !== undefined) {
        rows.push(["its KV", [this.toBlock(block, request), ", written in ", this.toStep(found.step)]]);
      }
    }
    const top = store.topTokens(request, number);
    if (top) rows.push(["most likely", candidateBars(top)]);
    return { title: this.tokenWords(request, number, 40), rows, request };
  }
}

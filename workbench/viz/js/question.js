// The visitor's own question: the box to write it in, and below it the newest one with its reply and, beside them, its
// way through the engine. It stands above the pictures of all requests.

import { AskBox } from "./ask.js";
import { h, plain, setText, unusable } from "./dom.js";
import { nameOf } from "./request.js";
import { withTerms } from "./terms.js";
import { wayOf } from "./way.js";

export class Question {
  constructor(view) {
    this.view = view;
    this.ask = new AskBox(view);
    this.closed = ""; // id of the question that was closed last
    this.prompt = h("bdi", { class: "wb-own-prompt" });
    this.reply = h("bdi", { class: "wb-own-reply" });
    this.name = h("button", { class: "wb-chip", type: "button", onclick: () => this.pin() }, h("i"), h("bdi", {}));
    this.state = h("span", { class: "wb-state" });
    const close = h("button", { class: "wb-quiet", type: "button", onclick: () => this.close() }, "Close");
    this.way = h("dl", { class: "wb-pinned" });
    this.waysTitle = h("h3", {}, "Its way through the engine");
    const text = h("div", {}, h("header", {}, this.name, this.state, close), this.prompt, this.reply);
    this.own = h(
      "section",
      { class: "wb-own", "aria-label": "Your question", hidden: true },
      text,
      h("div", {}, this.waysTitle, this.way),
    );
    this.element = h("div", { class: "wb-question" }, this.ask.element, this.own);
  }

  /** The questions of this view that no step has seen yet, as [id, prompt]. */
  get queued() {
    return this.view.own.all.filter(([id]) => !this.view.store.byId.has(id));
  }

  get request() {
    return this.view.store.byId.get(this.id);
  }

  pin() {
    if (this.request) this.view.inspector.pin({ kind: "request", request: this.request.index });
  }

  close() {
    this.closed = this.id;
    this.view.changed("status");
    this.ask.prompt.focus();
  }

  update() {
    const { view } = this, { status, shown, whole } = view;
    const kept = view.gone && this.ask.prompt.value; // what was typed stays to be read
    const here = view.panel("texts") && (!whole || shown === "story" || shown === "all");
    this.element.hidden = !here || !(view.may("ask") || kept);
    unusable(this.ask.submit, !view.may("ask"));
    if (this.element.hidden) return;
    this.ask.update(status);
    const [id, prompt] = view.own.all.at(-1) || [];
    this.own.hidden = !id || id === this.closed;
    if (this.own.hidden) return;
    this.id = id;
    const { request } = this, { theme } = view;
    const hue = (request && theme.hue(request.index)) || theme.ownHue;
    this.own.style.setProperty("--wb-hue", hue);
    setText(this.name.lastChild, nameOf({ id, own: true }));
    setText(this.prompt, prompt);
    if (request) this.show(request);
    else {
      setText(this.state, "queued");
      setText(this.reply, "");
      this.fill([["waits", ["for the next step"]]]);
    }
  }

  show(request) {
    const { store, cursor } = this.view, state = store.stateOf(request, cursor.last);
    const words = { finished: store.finishWords(request), preempted: "preempted, waiting to be recomputed" };
    const busy = state === "running" && (store.numOutput(request, cursor.last) ? "decoding" : "prefilling");
    setText(this.state, plain(words[state] || busy || state));
    // The reply is followed while it grows; then all of it is there to be read from its beginning.
    const over = state === "finished" || state === "aborted", ended = over && this.readable !== request.id;
    this.reply.dataset.over = String(over);
    const atEnd = this.reply.scrollTop + this.reply.clientHeight >= this.reply.scrollHeight - 4;
    const reply = request.tokens.map(({ text }) => text).join("").trimStart();
    setText(this.reply, request.numBefore ? `… ${reply}` : reply);
    if (ended) this.reply.scrollTop = 0;
    else if (atEnd && !over) this.reply.scrollTop = this.reply.scrollHeight;
    this.readable = over ? request.id : null;
    this.fill(wayOf(this.view, request));
  }

  /** Show facts; an engine that stands still can be told to run. */
  fill(facts) {
    if (this.view.status.state === "paused" && this.view.may("control")) {
      const run = { words: "Run it", go: () => this.view.engineDo("start") };
      facts = [...facts, ["engine", ["paused: ", run]]];
    }
    const { elementOf } = this.view.inspector, before = this.written ?? [];
    this.written = facts.map((fact) => JSON.stringify([this.id, fact]));
    // Only what differs, so that a link keeps the focus while the reply grows.
    facts.forEach(([name, parts], i) => {
      if (this.written[i] === before[i]) return;
      const pair = [h("dt", {}, withTerms(name)), h("dd", {}, parts.map(elementOf))];
      pair.forEach((element, side) => {
        const old = this.way.children[2 * i + side];
        if (old) old.replaceWith(element);
        else this.way.append(element);
      });
    });
    while (this.way.children.length > 2 * facts.length) this.way.lastChild.remove();
  }
}

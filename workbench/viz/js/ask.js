// The box in which a person asks the model something. Enter sends, Shift + Enter begins a new line.

import { formatNumber, h, setText } from "./dom.js";
import { form, submitButton } from "./popovers.js";

/** Number of weights below which a model is known for wrong facts. */
const SMALL_MODEL = 1e9;

/** Below this number of weights a model is there for tests. */
const TOY_MODEL = 5e6;

export class AskBox {
  constructor(view) {
    this.view = view;
    const words = { rows: 1, placeholder: "Ask the model something…", "aria-label": "Prompt" };
    this.prompt = h("textarea", { ...words, onkeydown: (event) => this.pressed(event) });
    const number = (name, value, step, title, min = 0) => {
      const input = h("input", { type: "number", name, value, step, min, class: "wb-number-input" });
      return h("label", { title }, name, input);
    };
    this.fields = [
      number("max_tokens", 128, 1, "Maximum number of output tokens", 1),
      number("temperature", 0, 0.1, "0 means greedy sampling"),
      number("priority", 0, 1, "Under the priority policy, smaller values are served first", null),
    ];
    this.chat = h("input", { type: "checkbox", name: "chat", checked: true });
    const title =
      "Write the prompt as a question in the model's chat template; without it, the model continues the text";
    this.chatLabel = h("label", { class: "wb-check", title }, this.chat, "chat template");
    const options = h(
      "details",
      {},
      h("summary", {}, "Options"),
      h("div", { class: "wb-group" }, this.fields, this.chatLabel),
    );
    this.small = h("p", { class: "wb-hint", hidden: true });
    this.submit = submitButton("Send");
    const parts = [this.prompt, this.submit, options, this.small];
    const onfocusout = (event) => this.left(event.relatedTarget);
    this.element = form({ class: "wb-form wb-ask", onfocusout }, () => this.send(), parts);
  }

  /** Without a question in it, the box closes in a low view when the focus leaves it. */
  left(next) {
    if (!this.prompt.value && !this.element.contains(next)) delete this.element.dataset.open;
  }

  focus() {
    this.element.dataset.open = "true";
    this.prompt.focus();
    this.element.scrollIntoView({ block: "nearest" });
  }

  pressed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.element.requestSubmit();
  }

  send() {
    const { view } = this, prompt = this.prompt.value;
    if (!view.may("ask")) return; // the page says why
    if (!prompt.trim()) return view.say("The prompt is empty: write a question first.");
    const values = Object.fromEntries(this.fields.map(({ lastChild }) => [lastChild.name, Number(lastChild.value)]));
    if (view.status.chat) values.chat = this.chat.checked;
    view.send("add_request", { prompt, run: true, ...values });
    view.cursor.toLive();
    this.asked = prompt;
    this.prompt.value = "";
  }

  update({ chat, message, kind }) {
    this.chatLabel.hidden = !chat;
    const size = this.view.store.facts.model?.num_parameters;
    this.small.hidden = !(size < SMALL_MODEL);
    if (!this.small.hidden) {
      const millions = formatNumber(Math.round(size / 1e6));
      const words = size < TOY_MODEL
        ? `A model with ${formatNumber(size)} weights writes nothing that makes sense.`
        : `A model with ${millions} million weights writes well and gets many facts wrong.`;
      setText(this.small, words);
    }
    if (message && kind !== "note") this.takeBack();
  }

  /** A prompt that was refused, to be mended, or not heard, comes back. */
  takeBack() {
    if (this.asked && !this.prompt.value) this.prompt.value = this.asked;
    this.asked = "";
  }
}

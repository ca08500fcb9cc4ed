// The link to a run: asked of the host, copied, and shown, because not every browser lets a page copy.

import { formatNumber, h, setText } from "./dom.js";
import { openBelow, place, popover } from "./popovers.js";

const COPIED = "Copied";
const SELECTED = "Copy the selected text";

export class LinkBox {
  constructor(view) {
    this.view = view;
    this.text = h("input", { class: "wb-long-link", type: "text", readonly: true, "aria-label": "The link" });
    this.words = h("p", { class: "wb-hint", role: "status" });
    this.element = popover("A link to this run", this.text, this.words);
  }

  /** A button that asks for the link. */
  button() {
    const title = "Copy a link that opens the run at this step in the playground";
    const button = h(
      "button",
      { class: "wb-button", type: "button", title, onclick: () => this.ask(button) },
      "Copy link",
    );
    return button;
  }

  /** Ask for the link to the step and the request at the cursor. */
  ask(opener) {
    this.opener = opener;
    const { store, cursor } = this.view;
    if (!store.numSteps) return this.view.say("There is no step yet to link to.");
    const request = store.requests[cursor.selected]?.id ?? null;
    this.view.send("link", { step: store.label(cursor.step), request });
  }

  /** Show the link, and copy it. */
  async take(link) {
    this.text.value = link;
    setText(this.words, "");
    if (this.opener?.isConnected) openBelow(this.element, this.opener);
    this.text.select();
    const copied = await (navigator.clipboard?.writeText(link).then(() => true, () => false) ?? false);
    const where = new URL(link).host;
    setText(
      this.words,
      `${copied ? COPIED : SELECTED}: ${formatNumber(link.length)} characters, which hold the whole run. It opens in ` +
        `the playground at ${where}, once “workbench playground” runs there; nothing is uploaded.`,
    );
    place(this.element);
  }
}

// A link, to a run or to a class: copied, and shown, because not every browser lets a page copy.

import { formatNumber, h, setText } from "./dom.js";
import { openBelow, place, popover } from "./popovers.js";
import { heldOf } from "./words.js";

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
    const title = "Copy a link that opens the steps of this page in the playground, at this one";
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
    const { store, cursor, place } = this.view;
    if (!store.numSteps) return this.view.say("There is no step yet to link to.");
    this.view.send("link", { step: store.label(cursor.step), request: place.request });
  }

  /** Take the link that was asked for, to the run or to what a part has of it. */
  take(link) {
    const size = `${formatNumber(link.length)} characters, which hold ${heldOf(this.view.store)}`,
      { host } = new URL(link);
    const where = `It opens in the playground at ${host}, once “workbench playground” runs there; nothing is uploaded.`;
    return this.show("A link to this run", link, this.opener, `${size}. ${where}`);
  }

  /**
   * Show a link below the button that asked for it, and copy it.
   * @param {string} about What is said of it.
   */
  async show(title, link, opener, about) {
    setText(this.element.querySelector("h3"), title);
    this.element.setAttribute("aria-label", title);
    this.text.value = link;
    setText(this.words, "");
    if (opener?.isConnected) openBelow(this.element, opener);
    this.text.select();
    const copied = await (navigator.clipboard?.writeText(link).then(() => true, () => false) ?? false);
    setText(this.words, `${copied ? COPIED : SELECTED}: ${about}`);
    place(this.element);
  }
}

// The page of a recorded kernel over the dashboard: the host makes it when a work item is clicked.

import { h, offerFile } from "./dom.js";

/** The end of the name of such a page, which workbench/viz/feed.py gives to it. */
const SUFFIX = ".kernelrun.html";

export const isKernelPage = (name) => name.endsWith(SUFFIX);

/** Show the page of a kernel that the host has made, instead of an earlier one. */
export function showKernelPage(root, name, content) {
  const blob = new Blob([content], { type: "text/html" });
  const close = () => dialog.remove();
  const button = (words, onclick) => h("button", { class: "wb-button", type: "button", onclick }, words);
  const frame = h("iframe", {
    // Its scripts reach nothing of this page.
    sandbox: "allow-scripts",
    srcdoc: new TextDecoder().decode(content),
    title: "Recorded kernel",
  });
  const tools = h("div", { class: "wb-bar" }, button("Save", () => offerFile(blob, name)), button("Close", close));
  const dialog = h("div", { class: "wb-kernel-page", role: "dialog", "aria-label": "Recorded kernel" }, tools, frame);
  dialog.addEventListener("keydown", (event) => event.key === "Escape" && close());
  root.querySelector(".wb-kernel-page")?.remove();
  root.append(dialog);
  tools.lastChild.focus();
}

/**
 * Ask the host for the recorded threadgroup of a work item of the step at the cursor; an older one is computed again.
 * @param item Its index in the kernel's list, or its fields.
 * @returns Whether the host can be asked.
 */
export function askForKernelRun(view, item, kvHead) {
  const { cursor, store } = view;
  if (!view.can("kernel_run")) return false;
  const step = store.label(cursor.step), newest = cursor.step === cursor.last;
  view.wait(newest ? "The work item is being recorded on the emulator…" : `Step ${step} is being computed again…`);
  view.send("kernel_run", { step, item, kv_head: kvHead });
  return true;
}

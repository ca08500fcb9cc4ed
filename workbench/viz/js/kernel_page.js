// The page of a recorded kernel over the dashboard: the host makes it when a work item is clicked.

import { h, offerFile } from "./dom.js";

/** The end of the name of such a page, which workbench/viz/feed.py gives to it. */
export const SUFFIX = ".kernelrun.html";

/**
 * Take a page that the host has made, its name in one line and then its content: show it if it is of a kernel.
 * @returns Whether it is.
 */
export function showKernelPage(root, bytes) {
  if (!bytes?.byteLength) return false;
  const data = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength), end = data.indexOf(10);
  const name = new TextDecoder().decode(data.slice(0, end));
  if (!name.endsWith(SUFFIX)) return false;
  const content = data.slice(end + 1), blob = new Blob([content], { type: "text/html" });
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
  root.append(dialog);
  tools.lastChild.focus();
  return true;
}

/**
 * Ask the host for the recorded threadgroup of a work item of the newest step.
 * @param item Its index in the kernel's list, or its fields.
 * @returns Whether the host can be asked.
 */
export function askForKernelRun(view, item, kvHead) {
  const { cursor, store } = view;
  if (!view.can("kernel_run") || cursor.step !== cursor.last) return false;
  view.say("The work item is being recorded on the emulator…");
  view.send("kernel_run", { step: store.label(cursor.step), item, kv_head: kvHead });
  return true;
}

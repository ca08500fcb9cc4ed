// The picture of a panel as a PNG: to the clipboard, or as a file.

import { formatNumber, h, offerFile } from "./dom.js";

const MARGIN = 8, TITLE = 22;

/** A canvas with the title of a panel and the step at the cursor above its picture, on the background of the theme. */
export function pictureOf(panel) {
  const { canvas, overlay, theme, store, cursor } = panel, ratio = canvas.width / panel.width;
  const whole = h("canvas");
  whole.width = canvas.width + 2 * MARGIN * ratio;
  whole.height = canvas.height + (TITLE + 2 * MARGIN) * ratio;
  const context = whole.getContext("2d"), { colours } = theme;
  context.fillStyle = colours.background;
  context.fillRect(0, 0, whole.width, whole.height);
  context.fillStyle = colours.text;
  context.font = `600 ${13 * ratio}px system-ui, sans-serif`;
  context.textBaseline = "top";
  const step = store.numSteps ? ` · step ${formatNumber(store.label(cursor.step))}` : "";
  context.fillText(`${panel.title}${step}`, MARGIN * ratio, MARGIN * ratio);
  context.drawImage(canvas, MARGIN * ratio, (MARGIN + TITLE) * ratio);
  const left = (parseFloat(overlay.style.left) || 0) * ratio;
  if (overlay.width) context.drawImage(overlay, MARGIN * ratio + left, (MARGIN + TITLE) * ratio);
  return whole;
}

/** The buttons that copy and save the picture of a panel. */
export function pictureButtons(panel) {
  const png = (take) => pictureOf(panel).toBlob(take, "image/png");
  const save = () => png((blob) => offerFile(blob, `${panel.title.toLowerCase().replaceAll(" ", "-")}.png`));
  // A browser without a clipboard for pictures, or one that does not allow it here, saves the file instead.
  const copy = () => {
    if (!globalThis.ClipboardItem || !navigator.clipboard?.write) return save();
    const blob = new Promise((resolve) => png(resolve));
    navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]).then(() => {
      panel.view.say(`${panel.title} is in the clipboard, as a picture.`);
    }, save);
  };
  const button = (label, title, onclick) => {
    return h("button", { class: "wb-quiet", type: "button", title, "aria-label": title, onclick }, label);
  };
  const buttons = [
    button("Copy", `Copy: put the picture of ${panel.title} into the clipboard`, copy),
    button("PNG", `PNG: save the picture of ${panel.title} as a file`, save),
  ];
  return h("span", { class: "wb-pictures" }, h("span", {}, buttons));
}

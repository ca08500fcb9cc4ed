// The picture of a panel as a PNG: to the clipboard, or as a file.

import { formatNumber, h, offerFile } from "./dom.js";

const MARGIN = 8, LINE = 18;

/** The step at the cursor of a panel, for a title. */
function stepOf({ store, cursor }) {
  return store.numSteps ? `step ${formatNumber(store.label(cursor.step))}` : "";
}

/**
 * A canvas with all that a panel shows, on the background of the theme: its title, the run and the step at the cursor,
 * the legend, the picture, and the marks above it. It is drawn for this, so a panel that is out of sight or shows its
 * table has the step at the cursor, too.
 */
export function pictureOf(panel) {
  const { hidden } = panel.body;
  panel.body.hidden = false;
  panel.render(new Set(["data"]));
  const whole = composed(panel);
  panel.body.hidden = hidden;
  return whole;
}

function composed(panel) {
  const { canvas, overlay, legend, holder, theme } = panel, ratio = canvas.width / panel.width;
  const lines = legend && !legend.element.hidden ? legend.element : null;
  const top = (MARGIN + 2 * LINE) * ratio + (lines?.height ?? 0), left = MARGIN * ratio, whole = h("canvas");
  whole.width = canvas.width + 2 * left;
  whole.height = top + canvas.height + left;
  const context = whole.getContext("2d"), { colours } = theme;
  context.fillStyle = colours.background;
  context.fillRect(0, 0, whole.width, whole.height);
  context.textBaseline = "top";
  const write = (words, line, font, colour) => {
    context.fillStyle = colour;
    context.font = `${font} system-ui, sans-serif`;
    context.fillText(words, left, (MARGIN + line * LINE) * ratio);
  };
  write(panel.title, 0, `600 ${13 * ratio}px`, colours.text);
  write([panel.view.name, stepOf(panel)].filter(Boolean).join(" · "), 1, `${11 * ratio}px`, colours.muted);
  if (lines) context.drawImage(lines, left, (MARGIN + 2 * LINE) * ratio);
  context.drawImage(canvas, left, top);
  if (overlay.width) context.drawImage(overlay, left + (parseFloat(overlay.style.left) || 0) * ratio, top);
  context.save();
  context.translate(left, top);
  context.scale(ratio, ratio);
  const origin = holder.getBoundingClientRect();
  for (const mark of holder.querySelectorAll(".wb-cursor, .wb-row-mark")) drawMark(context, mark, origin);
  context.restore();
  return whole;
}

/** Draw a mark that is an element above the canvas: a filled box, or a frame. */
function drawMark(context, mark, origin) {
  if (mark.hidden) return;
  const { left, top, width, height } = mark.getBoundingClientRect(), style = getComputedStyle(mark);
  const x = left - origin.left, y = top - origin.top, border = parseFloat(style.borderTopWidth);
  context.fillStyle = style.backgroundColor;
  context.fillRect(x, y, width, height);
  if (!border) return;
  context.strokeStyle = style.borderTopColor;
  context.lineWidth = border;
  context.strokeRect(x + border / 2, y + border / 2, width - border, height - border);
}

/** A name of a file that tells the run, the panel and the step. */
function fileName(panel) {
  const words = [panel.view.name, panel.title, stepOf(panel)].join("-").toLowerCase();
  return `${words.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "")}.png`;
}

/** The buttons that copy and save the picture of a panel. */
export function pictureButtons(panel) {
  const png = (take) => pictureOf(panel).toBlob(take, "image/png");
  const save = () => png((blob) => offerFile(blob, fileName(panel)));
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
  return [
    h("span", { class: "wb-copy" }, button("Copy", `Copy: put the picture of ${panel.title} into the clipboard`, copy)),
    button("PNG", `PNG: save the picture of ${panel.title} as a file`, save),
  ];
}

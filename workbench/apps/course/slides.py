"""A notebook as slides, in one page that opens offline.

The notebook's own marks say what begins a slide, what the next key shows, and what is left out. Jupyter's own slides
load their player from the network; a lecture hall may have none.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from workbench.base.on_demand import extra_for
from workbench.base.outside_files import read_text
from workbench.viz.export_html import OFFLINE_HEAD

CELL_SECONDS = 600
"""Maximum time of a cell."""

_WIDGET = "application/vnd.jupyter.widget-view+json"

_PAGE = (
    OFFLINE_HEAD
    + """<style>
{code_style}
:root {{ color-scheme: light; font: max(18px, 1.875vw)/1.4 system-ui, sans-serif; }}
body {{ margin: 0; background: #fff; color: #1a1d21; }}
section {{ box-sizing: border-box; min-height: 100vh; padding: 0.6rem 1.4vw 2rem; overflow: auto; }}
@media screen {{ [data-off] {{ display: none !important; }} }}
@media print {{ footer {{ display: none; }} }}
h1, h2, h3 {{ line-height: 1.2; margin: 0.6rem 0; }}
section > div > :is(h1, h2, h3, p, ul, ol) {{ max-width: 44em; }}
pre {{ font-size: 0.75rem; white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.5em; margin: 0.4rem 0;
  background: #f8f8f8; border-radius: 6px; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.2em 0.7em; text-align: left; border-bottom: 1px solid #e2e5ea; }}
/* From the last row of a room: type of at least 18 pixels on a screen of 1,280. */
section :is(table, td, th, .wb-repr, .wb-repr :is(table, p, li, h4, h5, pre)) {{
  font-size: max(0.75rem, 18px) !important;
}}
section .wb-repr {{ max-width: none; }}
/* A picture is as wide as the slide, if it is not too high then. */
section :is(img, svg) {{ width: 100%; height: auto; max-height: calc(100vh - 5.5rem); object-fit: contain;
  object-position: left top; }}
a.anchor-link, .jp-InputPrompt, .jp-OutputPrompt {{ display: none; }}
footer {{ position: fixed; right: 1rem; bottom: 0.3rem; font-size: max(0.6rem, 18px); color: #5c6470; }}
</style>
</head>
<body data-jp-theme-light="true">
<main>
{slides}
</main>
<footer aria-live="polite"></footer>
<script>
const slides = [...document.querySelectorAll("section")];
const WHOLE = "p, ul, ol, dl, pre, table, img, svg, details, blockquote, h1, h2, h3, h4, h5";
const HEADING = "h1, h2, h3, h4, h5";

/** The texts, code, tables and pictures of a part, none of which is divided. */
function blocksOf(element) {{
  const children = [...element.children].filter((child) => !child.matches("style, script"));
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const isInline = (child) => !child.matches(WHOLE) && getComputedStyle(child).display.startsWith("inline");
  const inline = children.some(isInline);
  if (element.matches(WHOLE) || !children.length || own || inline) return [element];
  return children.flatMap(blocksOf);
}}

/** Blocks, each with the headings before it. */
function grouped(blocks) {{
  const groups = [[]];
  for (const block of blocks) {{
    groups.at(-1).push(block);
    if (!block.matches(HEADING)) groups.push([]);
  }}
  return groups.filter((group) => group.length);
}}

/** Move rows from the end of a table to another one below it, with the same head, until it fits; returns that one. */
function rowsBeyond(table, fits) {{
  const rest = table.cloneNode(false), body = document.createElement("tbody"), {{ rows }} = table.tBodies[0];
  rest.removeAttribute("id");
  rest.dataset.rest = "";
  if (table.tHead) rest.append(table.tHead.cloneNode(true));
  rest.append(body);
  table.after(rest);
  rest.toggleAttribute("data-off", true);
  while (rows.length > 1 && !fits()) body.prepend(rows[rows.length - 1]);
  return rest;
}}

/** Put the rows of all tables together again. */
function joinTables() {{
  for (const rest of [...document.querySelectorAll("[data-rest]")].reverse()) {{
    rest.previousElementSibling.tBodies[0].append(...rest.tBodies[0].rows);
    rest.remove();
  }}
}}

/** A function for each screen of a slide, which shows it: a part joins the last screen, or begins another. */
function screensOf(slide) {{
  const parts = [...slide.children].map((part) => [part, blocksOf(part)]), all = parts.flatMap(([, blocks]) => blocks);
  const place = (shown) => {{
    for (const block of all) block.toggleAttribute("data-off", !shown.includes(block));
    for (const [part, blocks] of parts) {{
      part.toggleAttribute("data-off", !blocks.some((block) => shown.includes(block)));
    }}
  }};
  const fits = (shown) => {{
    place(shown);
    return slide.scrollHeight <= innerHeight + 1;
  }};
  const screens = [];
  let shown = [];
  for (const [, blocks] of parts) {{
    if (shown.length && !fits([...shown, ...blocks])) shown = [];
    const groups = shown.length || fits(blocks) ? [blocks] : grouped(blocks);
    for (const group of groups) {{
      if (shown.length && !fits([...shown, ...group])) {{
        const full = shown;
        screens.push(() => place(full));
        shown = [];
      }}
      if (!shown.length && group.at(-1).tBodies?.[0]?.rows.length > 1 && !fits(group)) {{
        const rest = rowsBeyond(group.at(-1), () => fits(group));
        all.push(rest);
        blocks.push(rest);
        groups.splice(groups.indexOf(group) + 1, 0, [rest]);
      }}
      shown = [...shown, ...group];
    }}
    const now = shown;
    screens.push(() => place(now));
  }}
  return screens;
}}

let place, at = Number(location.hash.slice(1)) || 0;
/** Divide the slides into screens of this window; every picture has its size already. */
function divide() {{
  joinTables();
  place = slides.flatMap((slide, s) => {{
    slides.forEach((each) => each.toggleAttribute("data-off", each !== slide));
    return screensOf(slide).map((show) => [s, show]);
  }});
  at = Math.min(place.length - 1, at);
}}
function show() {{
  const [s, display] = place[at];
  slides.forEach((slide, i) => slide.toggleAttribute("data-off", i !== s));
  display();
  scrollTo(0, 0);
  document.querySelector("footer").textContent = `${{s + 1}} of ${{slides.length}}`;
  history.replaceState(null, "", `#${{at}}`);
}}
/** Open the next answer that the slide hides; false if it hides none. */
function reveal() {{
  const hidden = slides[place[at][0]].querySelectorAll("details:not([open])");
  const next = [...hidden].find((each) => each.checkVisibility());
  if (!next) return false;
  next.open = true;
  keepInSight(next);
  return true;
}}
/** Divide the slides again, one of which has grown or shrunk, and show the screen that has this part. */
function keepInSight(part) {{
  const [slide] = place[at];
  divide();
  at = place.findIndex(([s]) => s === slide);
  show();
  while (part.closest("[data-off]") && place[at + 1]?.[0] === slide) {{
    at++;
    show();
  }}
}}
const turn = (key) => {{
  const move = {{ ArrowRight: 1, " ": 1, PageDown: 1, Enter: 1, ArrowLeft: -1, PageUp: -1 }}[key];
  if (key === "Home") at = 0;
  else if (key === "End") at = place.length - 1;
  else if (move > 0 && reveal()) return true;
  else if (move) at = Math.max(0, Math.min(place.length - 1, at + move));
  else return false;
  show();
  return true;
}};
addEventListener("keydown", (event) => turn(event.key) && event.preventDefault());
addEventListener("click", ({{ target }}) => target.closest("a, summary, button, input") || turn("ArrowRight"));
addEventListener("toggle", ({{ target }}) => target.closest("[data-off]") || keepInSight(target), true);
addEventListener("resize", () => {{
  const [slide] = place[at];
  divide();
  at = Math.max(0, place.findIndex(([s]) => s === slide));
  show();
}});
addEventListener("load", () => {{
  divide();
  show();
}});
divide();
show();
</script>
</body>
</html>
"""
)


def slides_page(path: Path, *, run: bool = True) -> str:
    """The page of a notebook's slides.

    Args:
        path: The notebook.
        run: Run it first, in its folder; otherwise its saved outputs are shown.

    Raises:
        ValueError: The file is not a notebook, a cell fails, no cell is marked as a slide, or no output is saved that
            could be shown.
    """
    with extra_for("slides"):
        import nbformat
        from nbclient.exceptions import CellExecutionError
        from nbconvert import HTMLExporter
        from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]

        from workbench.apps.course.notebook_client import notebook_client
    try:
        notebook = nbformat.reads(read_text(path), as_version=4)
    except OSError:
        raise
    except Exception as problem:
        raise ValueError(f"{path} is not a notebook that can be read: {problem}") from None
    if run:
        try:
            notebook_client(
                notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(path.parent)}}
            ).execute()
        except CellExecutionError as problem:
            raise ValueError(f"{path} does not run, so it has no pictures: {problem.ename}: {problem.evalue}") from None
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not run and code and not any(cell.outputs for cell in code):
        raise ValueError(
            f"{path} has no saved outputs, so its slides would have no pictures: run and save it first, or leave "
            "--saved out, and it runs here"
        )
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    slides: list[list[str]] = []
    for cell in notebook.cells:
        kind = cell.metadata.get("slideshow", {}).get("slide_type", "")
        if kind in ("skip", "notes") or (not slides and kind not in ("slide", "subslide")):
            continue
        html, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=[_shown(cell)]))
        if kind in ("slide", "subslide"):
            slides.append([])
        if kind == "":  # belongs to the part before
            slides[-1][-1] += html
        else:
            slides[-1].append(html)
    if not slides:
        raise ValueError(f"{path} marks no cell as a slide: set the slide type of its cells, as the course's do")
    body = "\n".join(f"<section>{''.join(f'<div>{part}</div>' for part in parts)}</section>" for parts in slides)
    style = HtmlFormatter().get_style_defs(".highlight")
    return _PAGE.format(title=escape(path.stem.replace("_", " ")), code_style=style, slides=body)


def _shown(cell: Any) -> Any:
    """A cell without live widgets, which need a kernel: the picture beside each stands for it."""
    if cell.cell_type == "code":
        cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
    return cell

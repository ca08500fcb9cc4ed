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
:root {{ color-scheme: light; font: 24px/1.45 system-ui, sans-serif; }}
body {{ margin: 0; background: #fff; color: #1a1d21; }}
section {{ box-sizing: border-box; min-height: 100vh; padding: 1.2rem 8vw 3rem; overflow: auto; }}
section[hidden], section > [hidden] {{ display: none; }}
h1, h2, h3 {{ line-height: 1.2; }}
pre {{ font-size: 0.75em; overflow: auto; padding: 0.5em; background: #f6f7f9; border-radius: 6px; }}
table {{ border-collapse: collapse; font-size: 0.75em; }}
th, td {{ padding: 0.2em 0.7em; text-align: left; border-bottom: 1px solid #e2e5ea; }}
img, svg {{ max-width: 100%; height: auto; }}
a.anchor-link, .jp-InputPrompt, .jp-OutputPrompt {{ display: none; }}
footer {{ position: fixed; right: 1rem; bottom: 0.5rem; font-size: 0.6em; color: #5c6470; }}
@media print {{ section[hidden], section > [hidden] {{ display: block; }} footer {{ display: none; }} }}
</style>
</head>
<body>
<main>
{slides}
</main>
<footer aria-live="polite"></footer>
<script>
const slides = [...document.querySelectorAll("section")];
const place = slides.flatMap((slide, s) => [...slide.children].map((_, part) => [s, part]));
let at = Math.min(place.length - 1, Number(location.hash.slice(1)) || 0);
function show() {{
  const [s, part] = place[at];
  slides.forEach((slide, i) => slide.hidden = i !== s);
  [...slides[s].children].forEach((each, i) => each.hidden = i > part);
  slides[s].children[part].scrollIntoView({{ block: "nearest" }});
  document.querySelector("footer").textContent = `${{s + 1}} of ${{slides.length}}`;
  history.replaceState(null, "", `#${{at}}`);
}}
const turn = (key) => {{
  const move = {{ ArrowRight: 1, " ": 1, PageDown: 1, Enter: 1, ArrowLeft: -1, PageUp: -1 }}[key];
  if (key === "Home") at = 0;
  else if (key === "End") at = place.length - 1;
  else if (move) at = Math.max(0, Math.min(place.length - 1, at + move));
  else return false;
  show();
  return true;
}};
addEventListener("keydown", (event) => turn(event.key) && event.preventDefault());
addEventListener("click", ({{ target }}) => target.closest("a, summary, button, input") || turn("ArrowRight"));
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
        ValueError: The file is not a notebook, a cell fails, or no cell is marked as a slide.
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

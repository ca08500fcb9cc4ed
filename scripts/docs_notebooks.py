"""Run the notebooks for the documentation: ``python scripts/docs_notebooks.py``, about five minutes on two cores.

The site shows the outputs of a notebook that was run after its last change.
"""

from __future__ import annotations

import json
import os
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError

from workbench.apps.course.notebook_client import notebook_client

ROOT = Path(__file__).parents[1]
NOTEBOOKS, EXECUTED = ROOT / "notebooks", ROOT / ".docs-notebooks"
MAX_TEXT = 4_000
"""Maximum number of characters of a printed output on a page."""
TITLE = re.compile(r"<h([1-6])>(.*?)</h\1>", re.DOTALL)
"""The title of an output, which would skip levels among the headings of a page."""


def cells(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook, with outputs if it has been run since its last change.

    Args:
        name: Its path in the repository.
    """
    source, executed = ROOT / name, EXECUTED / Path(name).name
    newest = executed if executed.exists() and executed.stat().st_mtime >= source.stat().st_mtime else source
    return list(json.loads(newest.read_text())["cells"])


def outputs(cell: dict[str, Any]) -> list[str]:
    """The outputs of a cell as HTML without scripts: pictures, tables, and texts."""
    found, printed = [], ""
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            printed += "".join(output["text"]) if output["name"] == "stdout" else ""
            continue
        data = output.get("data", {})
        html, text = "".join(data.get("text/html", "")), "".join(data.get("text/plain", ""))
        html = TITLE.sub(r"<p><strong>\2</strong></p>", html)
        found.append(f'<div class="wb-output">{html}</div>' if html and "<script" not in html else _plain(text))
    return [_plain(printed), *found] if printed else found


def _plain(text: str) -> str:
    return f'<pre class="wb-output">{escape(text[:MAX_TEXT])}</pre>'


def main() -> int:
    """Run every notebook that has changed since it was last run."""
    EXECUTED.mkdir(exist_ok=True)
    environment = os.environ | {"WORKBENCH_HEADLESS": "1", "PYTHONPATH": str(ROOT)}
    failed = 0
    for source in sorted(NOTEBOOKS.glob("*.ipynb")):
        executed = EXECUTED / source.name
        if executed.exists() and executed.stat().st_mtime >= source.stat().st_mtime:
            continue
        print(source.name, flush=True)
        notebook = nbformat.read(source, as_version=4)
        try:
            notebook_client(notebook, resources={"metadata": {"path": NOTEBOOKS}}).execute(env=environment)
        except CellExecutionError as problem:
            print(problem, file=sys.stderr)
            failed = 1
        else:
            nbformat.write(notebook, executed)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

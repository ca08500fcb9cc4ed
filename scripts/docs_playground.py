"""Live parts of the pages: workloads of the playground beside concepts, and notebooks that run in the browser."""

from __future__ import annotations

import build_lite

from workbench.apps.playground import runtime
from workbench.apps.playground.presets import PRESETS

LIVE = {
    "index.md": "documents",
    "concepts/step.md": "documents",
    "concepts/packed-batch.md": "bursts",
    "concepts/paged-kv.md": "agents",
    "concepts/chunked-prefill.md": "chunked",
    "concepts/preemption.md": "preemption",
    "concepts/prefix-caching.md": "prefix-caching",
}
"""The workload of the playground that a page shows live."""

HERE = "<!-- live -->"

FRAME = """

<details class="playground" open><summary>Try it live: {title}</summary>
<p>{hint} <a href="{address}" target="_blank">Open it in the playground</a></p>
<iframe src="{address}" title="The playground: {title}" loading="lazy" allow="clipboard-write"></iframe>
</details>

"""


def after_definition(markdown: str, live: str) -> str:
    """A page with something live where it says so, else below its first paragraph with the list that this announces."""
    if HERE in markdown:
        return markdown.replace(HERE, live.strip())
    parts = markdown.split("\n\n")
    indented = [part.startswith("    ") for part in parts[1:]] + [False]
    end = (
        next(
            index
            for index, part in enumerate(parts)
            if index and not part.rstrip().endswith(":") and not indented[index]  # code that continues the sentence
        )
        + 1
    )
    return "\n\n".join([*parts[:end], live.strip(), *parts[end:]])


def with_playground(markdown: str, name: str) -> str:
    """A page with its live example, if it has one and the playground's Python has been fetched.

    Args:
        markdown: The page.
        name: Its path below ``docs``.
    """
    if name not in LIVE or not runtime.is_fetched():
        return markdown
    title, hint, *_ = PRESETS[LIVE[name]]
    up = "" if name == "index.md" else "../" * (name.count("/") + 1)
    frame = FRAME.format(title=title, hint=hint, address=f"{up}playground/app/#preset={LIVE[name]}")
    return after_definition(markdown, frame)


def with_notebooks(markdown: str, name: str) -> str:
    """A page with links to the notebooks that run in the browser, if the site has them.

    Args:
        markdown: The page.
        name: Its path below ``docs``: the course, or the page of a notebook.
    """
    if not build_lite.is_installed():
        return markdown
    if name == "course.md":
        links = ", ".join(_link(notebook, notebook[:2], 1) for notebook in build_lite.NOTEBOOKS)
        said = f"These notebooks run in this browser, with nothing to install: {links}."
        return markdown.replace("## Exercises\n", f"{said} Cells with a model are left out.\n\n## Exercises\n", 1)
    notebook = name.rpartition("/")[2].partition(".")[0]
    if name.startswith("source/notebooks/") and notebook in build_lite.NOTEBOOKS:
        heading, _, rest = markdown.partition("\n")
        return f"{heading}\n\n{_link(notebook, 'Run this notebook in the browser', 3)}\n\n{rest}"
    return markdown


def _link(notebook: str, words: str, depth: int) -> str:
    return f'<a href="{"../" * depth}lite/lab/index.html?path={notebook}.ipynb">{words}</a>'

"""Hooks of mkdocs: pages that show the code and the notebooks, a real run, and the playground.

Links from pages into the code lead to a page of the site that shows the file, at the line; links to a notebook lead to
a page with its text and code. ``docs/data/run.jsonl.gz`` is a run of the real model (``scripts/make_docs_run.py``). The
site holds it once, as a saved page, and the page of a concept shows the view and the step that belong to it.
The playground is part of the site if its Python has been fetched, notebooks that run if JupyterLite is installed.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import build_lite
import docs_notebooks
from docs_playground import LIVE, after_definition, with_notebooks, with_playground
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from workbench.apps.playground import runtime, site
from workbench.trace import StepRecord, Trace
from workbench.viz.export_html import html_page
from workbench.viz.glossary import TERMS

ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.hooks")
LINK = re.compile(r"\]\((?:\.\./)+(workbench/[\w/]+\.py)#L(\d+)\)")
NOTEBOOK = re.compile(r"\]\((?:\.\./)+(notebooks/\w+\.ipynb)\)")
QUIET = "a|abbr|button|code|details|h1|h2|h3|h4|pre|script|style|svg|table"
"""Elements whose text explains no terms."""

FROM_NOTEBOOK = re.compile(r"\]\(\.\./docs/")
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "license.md": "LICENSE"}
UNLIKELY = "---\nsearch:\n  boost: 0.1\n---\n\n"
"""Front matter of a listing: a search shows pages before it."""

RUN, RUN_PAGE = ROOT / "docs/data/run.jsonl.gz", "run.html"

SHOWN: dict[str, tuple[str, Callable[[StepRecord], object], str]] = {
    "step": ("story", lambda step: step.num_decode_tokens, "The work of a step, in one sentence and in the timeline."),
    "packed-batch": (
        "kernel",
        lambda step: len(step.chunks) > 2,
        "The packed batch of a step, and the mask of its rows.",
    ),
    "paged-kv": (
        "story",
        lambda step: len(step.chunks) > 2,
        "Click a block of the KV pool, below the chunks, to see what it holds.",
    ),
    "chunked-prefill": (
        "story",
        lambda step: any(chunk.is_partial_prefill for chunk in step.chunks),
        "A long prompt in chunks, and short questions that arrive meanwhile.",
    ),
    "preemption": ("scheduler", lambda step: step.preempted, "A request gives its blocks back and waits."),
    "prefix-caching": (
        "scheduler",
        lambda step: any(chunk.num_cached_tokens for chunk in step.chunks),
        "A request begins behind the blocks that it finds.",
    ),
    "sampling": (
        "story",
        lambda step: step.num_decode_tokens > 1,
        "Hover over a token of a reply: which others were likely, and what removed them?",
    ),
}
"""For each concept the view, a condition for the step that is shown, and what there is to see."""


@cache
def _run() -> Trace:
    return Trace.load(RUN)


def on_config(config: Any) -> None:
    """Put the notebooks into the navigation, below the course."""
    course = next(entry["Course"] for entry in config["nav"] if "Course" in entry)
    names = sorted(path.name for path in docs_notebooks.NOTEBOOKS.glob("*.ipynb"))
    course.append({"Notebooks": [f"source/notebooks/{name}.md" for name in names]})


def on_files(files: Files, config: Any) -> Files:
    """Add pages for files of the code that a page links to, for notebooks and files of the root, and the saved run."""
    texts = [file.content_string for file in files if file.src_uri.endswith(".md")]
    for name in sorted({name for text in texts for name, _ in LINK.findall(text)}):
        text = (ROOT / name).read_text()
        content = f'{UNLIKELY}# {posixpath.basename(name)}\n\n`{name}`\n\n``````python linenums="1"\n{text}``````\n'
        files.append(File.generated(config, f"source/{name}.md", content=content))
    for path in docs_notebooks.NOTEBOOKS.glob("*.ipynb"):
        name = f"notebooks/{path.name}"
        files.append(File.generated(config, f"source/{name}.md", content=_notebook_page(name)))
    for page, name in ROOT_PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        content = text if name.endswith(".md") else f"{UNLIKELY}# License\n\n```\n{text}```\n"
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, RUN_PAGE, content=html_page(_run(), title="A run of SmolLM2")))
    return files


def _notebook_page(name: str) -> str:
    """A notebook as a page: its text, its code and its outputs, with the checks left out."""
    parts = []
    for cell in docs_notebooks.cells(name):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(FROM_NOTEBOOK.sub("](../../", source))
        elif "check" not in cell["metadata"].get("tags", []):
            parts += [f"``````python\n{source}\n``````", *docs_notebooks.outputs(cell)]
    return "\n\n".join(parts) + f"\n\nTo run it, see [the course](../../course.md); the file is `{name}`.\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links into the code and to notebooks lead to those pages; show run and playground on the page of a concept.

    The line of a link into the code is kept in the title, for ``on_page_content``.
    """
    up = "../" * page.file.src_uri.count("/")
    markdown = with_playground(markdown, page.file.src_uri)
    markdown = with_notebooks(markdown, page.file.src_uri)
    markdown = LINK.sub(lambda link: f']({up}source/{link[1]}.md "line {link[2]}")', markdown)
    markdown = NOTEBOOK.sub(lambda link: f"]({up}source/{link[1]}.md)", markdown)
    concept = page.file.src_uri.removeprefix("concepts/").removesuffix(".md")
    if concept not in SHOWN:
        return markdown
    if page.file.src_uri in LIVE:
        return markdown + _shown(concept, page)
    return after_definition(markdown, _shown(concept, page))  # without the playground, the run is the live example


def _shown(concept: str, page: Any) -> str:
    view, holds, words = SHOWN[concept]
    step = next(record.step for record in _run() if holds(record))
    address = f"{'../' * page.url.count('/')}{RUN_PAGE}#{view}/{step}"
    return (
        f"\n\n## In a real run\n\n{words} SmolLM2 answers four questions beside a long document; the picture "
        f'follows the mouse and the arrow keys. <a href="{address}">Open it in its own page</a>.\n\n'
        f'<iframe class="wb-run" src="{address}" title="A run of SmolLM2 at step {step}" loading="lazy"></iframe>\n'
    )


SIGNATURE = re.compile(r'(<div class="[^"]*highlight">(?:(?!</div>).)*</div>)\s*<p>Types: ((?:(?!</p>).)*)</p>', re.S)
TYPE = re.compile(r'<a (?:title="[^"]*" )?href="([^"]*)"><code>(\w+)</code></a>')


def linked(html: str) -> str:
    """HTML in which the types of a signature are links: those of the line below it, which mkdocs has checked."""

    def with_links(found: re.Match[str]) -> str:
        code = found[1]
        for address, name in TYPE.findall(found[2]):
            link = f'<a class="wb-type" href="{address}">{name}</a>'
            code, number = re.subn(rf'(<span class="\w+">){name}(</span>)', rf"\g<1>{link}\2", code)
            if not number:
                raise PluginError(f"{name} is not in the signature above its link to {address}")
        return code

    return SIGNATURE.sub(with_links, html)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Explain terms, and add the anchors of lines: the highlighter makes them, so mkdocs does not know them."""
    if page.file.src_uri.startswith("api/"):
        html = linked(html)
    if not page.file.src_uri.startswith(("source/", "glossary")) and page.file.src_uri not in ROOT_PAGES:
        html = explained(html)
    return re.sub(r'(href="[^"#]*source/[^"#]*)" title="line (\d+)"', r'\1#__codelineno-0-\2" title="line \2"', html)


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of the search, which the theme leaves without a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def explained(html: str) -> str:
    """HTML in which a term of the glossary shows its meaning when it is pointed at, once on a page."""
    left, quiet, parts = dict(TERMS), 0, []
    for part in re.split(r"(<[^>]*>)", html):
        if tag := re.match(rf"<(/?)({QUIET})\b", part):
            quiet += -1 if tag[1] else 1
        elif not quiet and not part.startswith("<"):
            for term in sorted(left, key=len, reverse=True):
                shown = f'<abbr title="{escape(left[term])}">\\1</abbr>'
                part, found = re.subn(rf"(?<![\w>-])({re.escape(term)}(?:e?s)?)(?![\w<-])", shown, part, count=1)
                if found:
                    del left[term]
                    break  # one term in a piece of text, so that no term is found in another one's meaning
        parts.append(part)
    return "".join(parts)


def on_post_build(config: Any, **_: Any) -> None:
    """Put the playground beside its page."""
    if runtime.is_fetched():
        site.build(Path(config["site_dir"]) / "playground" / "app")
    else:
        log.info("the site has no playground: `workbench playground --fetch` fetches its Python")
    if build_lite.is_installed():
        build_lite.build(Path(config["site_dir"]) / "lite")
    else:
        log.info("the site has no notebooks that run in the browser: `python scripts/build_lite.py` says why")

"""Hooks of mkdocs: links into the code, and the playground.

Links from pages into the code lead to a page of the site that shows the file, at the line. The playground is part of
the site if its Python has been fetched.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from workbench.playground import runtime, site

ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.hooks")
LINK = re.compile(r"\]\((?:\.\./)+(workbench/[\w/]+\.py)#L(\d+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file of the code that a page links to."""
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for name in sorted({name for page in pages for name, _ in LINK.findall(page.content_string)}):
        text = (ROOT / name).read_text()
        content = f'# {posixpath.basename(name)}\n\n`{name}`\n\n``````python linenums="1"\n{text}``````\n'
        files.append(File.generated(config, f"source/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links into the code lead to those pages. The line is kept in the title, for ``on_page_content``."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(lambda link: f']({up}source/{link[1]}.md "line {link[2]}")', markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Add the anchors of the lines, which mkdocs does not know because they are made by the highlighter."""
    return re.sub(r'(href="[^"#]*source/[^"#]*)" title="line (\d+)"', r'\1#__codelineno-0-\2" title="line \2"', html)


def on_post_build(config: Any, **_: Any) -> None:
    """Put the playground beside its page."""
    if runtime.is_fetched():
        site.build(Path(config["site_dir"]) / "playground" / "app")
    else:
        log.info("the site has no playground: `workbench playground --fetch` fetches its Python")

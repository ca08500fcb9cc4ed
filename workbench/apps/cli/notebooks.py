"""``workbench notebooks``: the course, copied into a folder of the reader's."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import workbench
from workbench.apps.cli.options import Commands, add_command
from workbench.apps.cli.say import say

PACKAGE = Path(workbench.__file__).parent
INSTALLED = PACKAGE / "apps" / "course" / "notebooks"
COURSE = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "notebooks"
"""The folder of the course: in an installed package it is inside, in a checkout beside the package."""
DOCS = PACKAGE.parent / "docs"
"""The documentation of a checkout; an installed package has none, but may know its address."""
FIRST = "00_tour.ipynb"
_LINK = re.compile(rb"\[([^\[\]]*)\]\(\.\./docs/([^)]*)\)")


def add_parser(commands: Commands) -> None:
    """Add ``notebooks`` to the commands."""
    parser = add_command(commands, "notebooks", run, "copy the course into a folder and say how to open it")
    default = "workbench-notebooks"
    help = "created if needed (default: %(default)s)"
    parser.add_argument("folder", type=Path, nargs="?", default=default, metavar="DIR", help=help)
    parser.add_argument("--force", action="store_true", help="replace notebooks that you changed")


def run(options: argparse.Namespace) -> int:
    """Copy the course and print the command that opens it.

    Returns:
        Exit status.

    Raises:
        ValueError: The folder is a file, or the package was installed without its notebooks.
        OSError: A file cannot be read or written.
    """
    kept = copy_course(options.folder, force=options.force)
    if kept:
        say(f"kept your version of {', '.join(kept)} (--force replaces it)")
    jupyter = "jupyter" if shutil.which("jupyter") else str(Path(sys.executable).with_name("jupyter"))
    print(f"the course is in {options.folder}; open it with\n")
    root = [] if published_docs() or (above := root_of(options.folder)) is None else [f"--ServerApp.root_dir={above}"]
    print(f"    {shlex.join([jupyter, 'lab', *root, str(options.folder / FIRST)])}")
    return 0


def copy_course(folder: Path, *, force: bool = False) -> list[str]:
    """Copy the notebooks and their data into a folder; links to the documentation lead there from the new place.

    Args:
        folder: Created if it does not exist.
        force: Replace files that differ from the course's.

    Returns:
        Files in ``folder`` that differ from the course's and were kept.

    Raises:
        ValueError: ``folder`` is a file, or the package was installed without its notebooks.
        OSError: A file cannot be read or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder, or one that does not exist yet")
    sources = sorted([*COURSE.glob("*.ipynb"), *COURSE.glob("data/*")])
    if not sources:
        raise ValueError(f"{COURSE} holds no notebooks: install inference-workbench again")
    kept, docs = [], docs_from(folder)
    for source in sources:
        name = source.relative_to(COURSE)
        target, content = folder / name, source.read_bytes()
        if source.suffix == ".ipynb":
            content = with_links(content, docs)
        if target.exists() and target.read_bytes() != content and not force:
            kept.append(str(name))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return kept


def published_docs() -> str:
    """The address of the documentation of a release, "" for none."""
    try:
        urls = metadata.metadata("inference-workbench").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    for url in urls:
        label, _, address = url.partition(", ")
        if label == "Documentation":
            return str(address).removesuffix("/index.md")
    return ""


def root_of(folder: Path) -> Path | None:
    """The folder above a copy of the course and the documentation of the checkout, which JupyterLab must serve.

    It follows no link out of the folder that it serves. None if only the whole disk holds both, or without a checkout.
    """
    if not DOCS.is_dir():
        return None
    try:
        root = Path(os.path.commonpath([DOCS.resolve(), folder.resolve()]))
    except ValueError:  # another drive
        return None
    return None if root == root.parent else root


def docs_from(folder: Path) -> str:
    """The documentation as notebooks in a folder can link to it: an address or a relative path, "" for none."""
    if address := published_docs():
        return address
    if root_of(folder) is None:
        return ""
    return quote(Path(os.path.relpath(DOCS.resolve(), folder.resolve())).as_posix())


def with_links(notebook: bytes, docs: str) -> bytes:
    """A notebook whose links to the documentation lead to ``docs``.

    Args:
        notebook: The notebook, whose links begin with ``../docs/``.
        docs: The documentation as `docs_from` gives it; without one the links become text that names the page.
    """

    def link(match: re.Match[bytes]) -> bytes:
        label, page = match.groups()
        return b"[%b](%b/%b)" % (label, docs.encode(), page) if docs else b"%b (docs/%b)" % (label, page)

    return _LINK.sub(link, notebook)

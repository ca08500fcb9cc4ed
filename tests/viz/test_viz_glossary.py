"""One glossary: the page says what the views say, each word is used, and no second name of it is."""

import re
from pathlib import Path

import pytest

from workbench.viz.glossary import SECOND_NAMES, TERMS

ROOT = Path(__file__).parents[2]
PLACES = (
    "workbench/viz/**/*.js",
    "workbench/apps/playground/page/*",
    "workbench/trace/readings/narrate.py",
    "docs/**/*.md",
)


def sources():
    paths = sorted(
        path for place in PLACES for path in ROOT.glob(place) if path.suffix in (".js", ".html", ".md", ".py")
    )
    assert len(paths) > 60
    return {path: path.read_text(encoding="utf-8") for path in paths}


def second_names(text):
    return [name for name in SECOND_NAMES if re.search(rf"\b{re.escape(name)}s?\b", text, re.IGNORECASE)]


def test_the_page_and_the_views_have_one_glossary():
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| ", page, re.MULTILINE)
    assert {word: meaning.replace("`", "") for word, meaning in rows} == TERMS
    assert [word for word, _ in rows] == sorted((word for word, _ in rows), key=str.lower)


@pytest.mark.parametrize("name", SECOND_NAMES)
def test_no_second_name_appears(name):
    assert SECOND_NAMES[name] in TERMS or SECOND_NAMES[name] == "first token"
    found = [str(path.relative_to(ROOT)) for path, text in sources().items() if name in second_names(text)]
    assert found == [], f"say {SECOND_NAMES[name]!r} instead of {name!r}"


def test_a_planted_second_name_is_found():
    assert second_names("The KV pages of its page table") == ["KV page", "page table"]

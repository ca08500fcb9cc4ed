"""The documentation's pages show the playground live, if its Python has been fetched."""

import re
from pathlib import Path

import docs_playground
import pytest

from workbench.playground.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", docs_playground.LIVE)
def test_a_page_of_a_concept_has_a_live_example_below_its_title(name, monkeypatch):
    markdown = (DOCS / name).read_text()
    monkeypatch.setattr(docs_playground.runtime, "is_fetched", lambda: True)
    shown = docs_playground.with_playground(markdown, name)
    title, _, rest = shown.partition("\n")
    assert title == markdown.partition("\n")[0] and rest.lstrip().startswith("<details")
    (address,) = re.findall(r'<iframe src="([^"]*)"', shown)
    assert (
        address == f"../../playground/app/#preset={docs_playground.LIVE[name]}"
        and docs_playground.LIVE[name] in PRESETS
    )


def test_other_pages_and_a_site_without_the_playground_are_as_they_were(monkeypatch):
    for fetched in (False, True):
        monkeypatch.setattr(docs_playground.runtime, "is_fetched", lambda fetched=fetched: fetched)
        for name in ("serve.md", *([] if fetched else docs_playground.LIVE)):
            markdown = (DOCS / name).read_text()
            assert "<iframe" not in docs_playground.with_playground(markdown, name)

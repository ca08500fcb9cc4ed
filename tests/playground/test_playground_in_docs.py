"""The documentation's pages show the playground live, if its Python has been fetched."""

import re
from pathlib import Path

import docs_playground
import pytest

from workbench.apps.playground.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", docs_playground.LIVE)
def test_a_page_has_a_live_example_below_its_first_paragraph(name, monkeypatch):
    markdown = (DOCS / name).read_text()
    monkeypatch.setattr(docs_playground.runtime, "is_fetched", lambda: True)
    shown = docs_playground.with_playground(markdown, name)
    before, _, _ = shown.partition("<details")
    assert markdown.startswith(before) and 100 < len(before) < 1500 and before.count("# ") == 1
    last = before.rstrip().split("\n\n")[-1]
    assert last.startswith(("    ", "-", "|", "<")) or last.endswith((".", ")", "```")), "no sentence is broken in two"
    depth = "" if name == "index.md" else "../../"
    (address,) = re.findall(r'<iframe src="([^"]*)"', shown)
    assert (
        address == f"{depth}playground/app/#preset={docs_playground.LIVE[name]}"
        and docs_playground.LIVE[name] in PRESETS
    )


def test_other_pages_and_a_site_without_the_playground_are_as_they_were(monkeypatch):
    for fetched in (False, True):
        monkeypatch.setattr(docs_playground.runtime, "is_fetched", lambda fetched=fetched: fetched)
        for name in ("serve.md", *([] if fetched else docs_playground.LIVE)):
            markdown = (DOCS / name).read_text()
            assert "<iframe" not in docs_playground.with_playground(markdown, name)


def test_the_course_and_its_notebooks_lead_to_those_that_run_in_the_browser(monkeypatch):
    course = (DOCS / "course.md").read_text()
    monkeypatch.setattr(docs_playground.build_lite, "is_installed", lambda: False)
    assert docs_playground.with_notebooks(course, "course.md") == course
    monkeypatch.setattr(docs_playground.build_lite, "is_installed", lambda: True)
    shown = docs_playground.with_notebooks(course, "course.md")
    for name in docs_playground.build_lite.NOTEBOOKS:
        assert f'href="../lite/lab/index.html?path={name}.ipynb"' in shown
        page = docs_playground.with_notebooks("# Title\n\ntext\n", f"source/notebooks/{name}.ipynb.md")
        title, _, rest = page.partition("\n")
        assert title == "# Title" and f'"../../../lite/lab/index.html?path={name}.ipynb"' in rest
    other = "source/notebooks/00_tour.ipynb.md"
    assert docs_playground.with_notebooks("# Title\n", other) == "# Title\n"

"""Pages in deno for the tests of the views' code."""

from pathlib import Path

import pytest

from workbench.viz.bundle import bundle


@pytest.fixture(scope="session")
def deno_page():
    from pages_in_deno import DENO, Page

    if not Path(DENO).exists():
        pytest.skip("deno is not installed, so the views' code cannot be run without a browser")
    page = Page(bundle())
    yield page
    page.close()


@pytest.fixture
def drawn(deno_page):
    """A function that shows a run by its name, and returns the page, its facts and its colours."""
    from painted import Colours
    from runs_to_draw import run

    def drawn_(name, **options):
        trace, facts = run(name)
        deno_page.open(trace, **options)
        return deno_page, facts, Colours(facts.records)

    return drawn_

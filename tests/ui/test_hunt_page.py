"""The page of a finding in a browser: it opens at the step that breaks the law, with the law in red."""

import sys
from pathlib import Path

from workbench.analysis.hunt import hunt

sys.path.insert(0, str(Path(__file__).parents[1] / "hunt"))


def test_the_page_opens_at_the_step_that_breaks_the_law(open_page, tmp_path):
    (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path)
    page = open_page(f"file://{tmp_path / finding.folder}/page.html")
    page.wait("view.store.numSteps > 0")
    assert page.view("view.cursor.step") == finding.step
    colour = "(element) => getComputedStyle(element).color"
    heading = page.page.locator("h1", has_text=f"Step {finding.step} breaks the law of limits")
    assert heading.evaluate(colour) == "rgb(204, 0, 0)"
    steps = page.page.locator("section ol li")
    assert [steps.nth(at).evaluate(colour) == "rgb(204, 0, 0)" for at in range(steps.count())] == [
        at == finding.step for at in range(steps.count())
    ]

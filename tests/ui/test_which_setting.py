"""The setting that meets a target, in the dashboard: the same answer as `trace.tune`, with its picture."""

import random

import pytest

from workbench import simulate
from workbench.analysis.check import shown
from workbench.simulation.costs.cost_model import CostModel


def loaded_server():
    """Too few seats for its load, so that more of them help."""
    rng = random.Random(2)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": rng.randint(20, 200)},
            "max_tokens": rng.randint(10, 40),
            "arrival_time": i * 0.03,
        }
        for i in range(40)
    ]
    config = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "num_blocks": 2000}
    cost = CostModel(fixed=0.01, per_sequence=0.0005, per_prefill_token=0.0001)
    return simulate({"config": config, "requests": requests}, cost_model=cost)


def test_the_best_setting_and_those_after_it(open_page, serve, page_of):
    trace = loaded_server()
    page = open_page(serve(trace))
    page.wait(f"view.store.numSteps === {len(trace)}")
    page.root.get_by_role("button", name="Which setting?").click()
    dialog = page.root.get_by_role("dialog", name="Which setting?")
    target = dialog.get_by_label("Target")
    target.fill("speed=1s")
    target.press("Enter")
    page.wait("view.status.tuned?.verdict.includes('no target')")
    assert dialog.get_by_role("status").inner_text().startswith("no target is known for 'speed'; the names are")
    assert dialog.locator("img").count() == 0 and dialog.locator(".wb-tuning").inner_text() == ""
    target.fill("ttft_p99=900ms, itl_p99=100ms")
    target.press("Enter")
    page.wait("view.status.tuned?.candidates.length > 2")
    page.frame()
    tuning = trace.tune("ttft_p99=900ms,itl_p99=100ms")
    assert tuning.best.changes and tuning.runners_up, "the test needs a setting that is better than the recorded one"
    assert len(tuning.costs) > 2
    costs = "".join(f", {name} {shown(name, old)} to {shown(name, new)}" for name, (old, new) in tuning.costs.items())
    assert dialog.locator(".wb-tuning > p").first.inner_text() == f"It costs{costs[1:]}."
    rows = dialog.locator("tbody tr")
    assert rows.count() == 2 + len(tuning.runners_up)
    said = [rows.nth(i).inner_text() for i in range(rows.count())]
    assert said[0].startswith("closest") and said[1].startswith("now") and said[2].startswith("2.")
    for row, candidate in zip(said, [tuning.best, tuning.current, *tuning.runners_up]):
        assert all(f"{name}={value}" in row for name, value in candidate.changes.items())
        assert candidate.flags in row
    for width in (390, 1100, 1440):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.frame()
        target.press("Enter")
        page.wait("view.status.handled === view.commandCount && view.status.tuned?.candidates.length > 2")
        page.frame()
        box = dialog.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 900, width
        answer = dialog.locator(".wb-tuning")
        assert answer.evaluate("(e) => e.scrollWidth <= e.clientWidth"), "nothing is beyond its edge"
        for picture in dialog.locator("img").all():
            assert (
                picture.evaluate("async (e) => { await e.decode(); return e.getBoundingClientRect().width; }")
                >= 9 / 12 * 440 - 40
            ), "letters of 12 px are not much smaller"
    svg = "".join(page.view("view.status.tuned.pictures"))
    points = svg.count('r="3.5"') + svg.count('r="5"')
    assert points == 2 * rows.count(), "the settings of the table"
    circles = svg.count('r="5"') + svg.count('r="3.5"')
    assert (
        circles == svg.count("<circle") == 2 * (2 + len(tuning.runners_up))
        and ">closest</text>" in svg
        and ">now</text>" in svg
    )
    for number in range(2, 2 + len(tuning.runners_up)):
        assert svg.count(f">{number}.</text>") == 2, "the numbers are those of the table"
    assert "P99 time to first token (s)" in svg and "P99 inter-token latency (ms)" in svg
    page.wait("view.status.tuning === null")
    page.frame()
    assert dialog.get_by_role("button", name="Cancel").is_hidden() and dialog.locator("progress").is_hidden()
    target.press("Escape")
    assert dialog.is_hidden()

    saved = page_of(trace)  # a page without a host cannot simulate
    saved.frame()
    assert saved.root.get_by_role("button", name="Which setting?").is_hidden()


def test_a_search_shows_how_far_it_is_and_ends_when_told(open_page, serve):
    """The host says the numbers of settings; Cancel answers with the best one so far."""
    page = open_page(serve(loaded_server()))
    page.root.get_by_role("button", name="Which setting?").click()
    dialog = page.root.get_by_role("dialog", name="Which setting?")
    page.view("view.tuningForm.showProgress([7, 45])")
    assert "7 of 45 settings" in dialog.get_by_role("status").inner_text()
    assert dialog.locator("progress").evaluate("(bar) => bar.value / bar.max") == pytest.approx(7 / 45)
    sent = page.view("(() => { const names = []; view.send = (name) => names.push(name); "
                     "view.tuningForm.cancel.click(); return names; })()")  # fmt: skip
    assert sent == ["end_tuning"]


@pytest.mark.repeats(of="test_no_view_of_a_recording_has_a_serious_finding")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_its_dialog_has_no_serious_finding(axe_findings, open_page, serve, dark):
    trace = loaded_server()
    page = open_page(serve(trace), dark=dark)
    page.wait(f"view.store.numSteps === {len(trace)}")
    page.root.get_by_role("button", name="Which setting?").click()
    page.frame()
    assert axe_findings(page.page) == [], "the form"
    target = page.root.get_by_role("dialog", name="Which setting?").get_by_label("Target")
    target.fill("ttft_p99=900ms, itl_p99=100ms")
    target.press("Enter")
    page.wait("view.status.tuned?.candidates.length > 2")
    page.frame()
    assert axe_findings(page.page) == [], "the answer"

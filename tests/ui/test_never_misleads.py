"""The answers of a view hold: times are those of a second run, and nothing that happens goes unsaid."""

import re
from statistics import fmean

import numpy as np
import pytest
from viz_traces import ReplayingController

from workbench import Engine, EngineConfig
from workbench.viz.feed import Feed


def p99(values):
    """The 99th percentile, between two values where it lies there."""
    return float(np.percentile(values, 99))


class VirtualTime:
    """Stands in for the module ``time``: a forward pass takes as long as its rows say, and nothing else takes time."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("workbench.engine.engine.time", self)

    def perf_counter(self):
        return self.now

    time = perf_counter

    def slow_down(self, engine):
        forward = engine.runner.forward

        def timed(packed):
            self.now += 0.05 + 0.01 * len(packed.token_ids)
            return forward(packed)

        engine.runner.forward = timed


def run(clock, model, budget):
    """A run of four requests of several lengths; the engine is open."""
    rng = np.random.default_rng(11)
    config = EngineConfig(max_num_batched_tokens=budget, block_size=4, num_blocks=256, enable_prefix_caching=False)
    engine = Engine(model, config)
    clock.slow_down(engine)
    for name, length in {"long": 96, "short": 7, "other": 40, "last": 5}.items():
        prompt = [int(token) for token in rng.integers(5, 60, length)]
        engine.add_request(prompt, request_id=name, max_tokens=24, ignore_eos=True)
    engine.run(progress=False)
    return engine


def seconds(text):
    number, unit = re.fullmatch(r"([\d.]+) (s|ms|µs)", text).groups()
    return float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_the_times_of_what_if_are_those_of_a_second_run(open_page, serve, tiny_llama, monkeypatch):
    clock = VirtualTime(monkeypatch)
    with run(clock, tiny_llama, 64) as engine, run(clock, tiny_llama, 12) as second:
        page = open_page(serve(engine))
        page.wait(f"view.store.numSteps === {len(engine.trace)}")
        page.page.keyboard.press("w")
        dialog = page.root.get_by_role("dialog", name="What if")
        dialog.get_by_label("max_num_batched_tokens").fill("12")
        page.wait("view.other && view.other.comparison")
        page.frame()
        words = dialog.locator(".wb-verdict").text_content()
        found = re.fullmatch(
            r"worse: (.+) (\S+ \S+) -> (\S+ \S+) \(.+\); better: (.+) (\S+ \S+) -> (\S+ \S+) \(.+\)", words
        )
        assert found, words
        requests = [trace.metrics().requests.values() for trace in (engine.trace, second.trace)]
        firsts = [[each.ttft.seconds for each in side] for side in requests]
        gaps = [[gap for each in side for gap in each.gaps("s")] for side in requests]
        weighed = {"mean TTFT": (fmean, firsts), "mean ITL": (fmean, gaps)}
        weighed |= {"longest TTFT": (max, firsts), "longest pause": (max, gaps)}
        weighed |= {"P99 TTFT": (p99, firsts), "P99 ITL": (p99, gaps)}
        measured = {name: tuple(map(statistic, sides)) for name, (statistic, sides) in weighed.items()}
        worst, *times = found.groups()
        best = times.pop(2)
        assert [seconds(text) for text in times] == pytest.approx([*measured[worst], *measured[best]], rel=0.1)
        shares = {name: after / before for name, (before, after) in measured.items()}
        assert shares[worst] > 0.95 * max(shares.values()) > 1.1 and shares[best] < 1.05 * min(shares.values()) < 1
        told = page.view("view.other.comparison.fork.predicted")
        assert told.startswith("Both sides are predicted")
        assert all(abs(int(error)) < 20 for error in re.findall(r"([+-]\d+)% for (?:mean|time)", told)), told


def test_the_wheel_moves_the_page_over_every_panel(page_of, long_trace):
    page = page_of(long_trace, height=700)
    page.view("view.cursor.toLive()")
    page.frame()
    for panel in ("texts", "events"):
        element = page.root.locator(f"[data-panel={panel}]")
        element.scroll_into_view_if_needed()
        box = element.bounding_box()
        page.page.mouse.move(box["x"] + 60, max(box["y"] + 80, 80))
        before = page.page.evaluate("scrollY")
        page.page.mouse.wheel(0, -120)
        page.page.wait_for_function("(before) => scrollY < before", arg=before)


def test_a_command_that_nobody_hears_is_explained(open_page, serve, long_trace, monkeypatch):
    """As in a notebook whose kernel runs a cell."""
    controller = ReplayingController(long_trace)
    for _ in range(5):
        controller.step()
    page = open_page(serve(controller))
    page.wait("view.store.numSteps === 5")
    page.view("(view.connection.document = null)")  # of a notebook the page knows no server
    monkeypatch.setattr(Feed, "handle", lambda feed, command: None)
    page.root.get_by_role("button", name="Run the engine").click()
    alert = page.root.get_by_role("alert")
    page.wait("root.querySelector('[role=alert]').textContent.includes('No answer yet')")
    assert "Interrupt the kernel" in alert.text_content()


def test_first_and_last_are_mirrored(page_of, long_trace):
    page = page_of(long_trace)
    buttons = {button.inner_text(): button for button in page.root.get_by_role("button").all() if button.is_visible()}
    buttons["|◀"].click()
    assert page.view("view.cursor.step") == 0
    buttons["▶|"].click()
    assert page.view("view.cursor.step") == len(long_trace) - 1


def test_the_address_of_a_saved_page_names_a_view_and_a_step(open_page, tmp_path, long_trace):
    long_trace.to_html(tmp_path / "trace.html")
    page = open_page(f"file://{tmp_path}/trace.html#kernel/12")
    page.wait("view.store.numSteps > 0 && view.cursor.step === 12")
    assert page.view("view.shown") == "kernel"
    page.frame()
    assert page.root.locator(".wb-sentence").text_content() == str(long_trace[12])

"""Views follow a run at a pace that leaves the processor to the engine."""

import asyncio
import concurrent.futures
import contextlib

import pytest
from viz_traces import random_trace

panel = pytest.importorskip("panel")

from workbench.viz.app import make_app  # noqa: E402
from workbench.viz.feed import REPEAT_STEPS, Feed  # noqa: E402
from workbench.viz.pace import SHARE, SHARE_OF_ALL, Pace, processor_seconds  # noqa: E402


@pytest.fixture
def quickly(monkeypatch):
    """Updates come as often as they can."""
    monkeypatch.setattr("workbench.viz.pace.POLL_SECONDS", 0.001)
    monkeypatch.setattr("workbench.viz.pace.LONGEST_SECONDS", 0.001)


def test_an_open_page_is_no_longer_updated_when_the_interpreter_exits(monkeypatch, caplog, quickly):
    started = []
    monkeypatch.setattr(panel.state, "onload", started.append)
    page = make_app(random_trace(1))()
    monkeypatch.setattr(page, "is_far_behind", lambda: True)

    async def show():
        executor = concurrent.futures.ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(executor)
        await started[0]()
        assert page.packet
        page.packet = b""
        executor.shutdown()
        page._feed.handle({"name": "resend"})
        await asyncio.sleep(0.2)
        assert page.packet == b""
        assert not caplog.records

    with concurrent.futures.ThreadPoolExecutor() as thread:  # a browser test may have left a loop on this one
        thread.submit(asyncio.run, show()).result()


def test_a_page_that_is_not_loaded_is_prepared_outside_the_event_loop():
    """Its packets hold all requests and strings each time, whatever was sent before."""
    feed = Feed(random_trace(1)[:REPEAT_STEPS])
    assert feed.is_far_behind()
    feed.confirm()
    assert not feed.is_far_behind(), "a loaded page gets a few steps, which take no longer than handing them over"
    assert feed.next_packet() and not feed.is_far_behind()


def test_an_open_page_follows_its_session_and_ends_with_it(monkeypatch, caplog, quickly):
    started, ended = [], []
    monkeypatch.setattr(panel.state, "onload", started.append)
    monkeypatch.setattr(panel.state, "on_session_destroyed", ended.append)
    page = make_app(random_trace(1))()

    async def happens(condition, seconds=60.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.001)

    async def resend(seconds=60.0):
        page.packet = b""
        page._feed.handle({"name": "resend"})
        await happens(lambda: page.packet, seconds)

    async def show():
        await started[0]()
        await resend()
        refresh, page.refresh = page.refresh, lambda: 1 / 0
        await happens(lambda: "an update of a view failed" in caplog.text)
        page.refresh = refresh
        await resend()  # a failed update does not end the following
        for end in ended:
            end(None)
        with pytest.raises(TimeoutError):
            await resend(0.2)

    with concurrent.futures.ThreadPoolExecutor() as thread:  # a browser test may have left a loop on this one
        thread.submit(asyncio.run, show()).result()


def test_expensive_updates_come_less_often(monkeypatch):
    spent = iter([0.0, 0.001, 0.0, 0.01, 0.0, 5.0, 0.0, 0.001])
    monkeypatch.setattr("workbench.viz.pace.time.thread_time", lambda: next(spent))
    pace, waits = Pace(), []
    for _ in range(4):
        with pace.update():
            pass
        waits.append(pace.seconds)
    assert waits == pytest.approx([0.1, 0.5, 1.0, 0.1])
    monkeypatch.setattr("workbench.viz.pace.time.thread_time", iter([3.0, 3.004, 3.004, 3.004]).__next__)
    seconds = processor_seconds(lambda: None)
    with pace.update(seconds):
        pass
    assert pace.seconds == pytest.approx(0.2), "what another thread has prepared counts too"


def test_a_page_waits_for_what_its_packet_has_cost_another_thread(monkeypatch):
    started, costs = [], []
    monkeypatch.setattr(panel.state, "onload", started.append)
    monkeypatch.setattr("workbench.viz.app.processor_seconds", lambda work: (work(), 7.0)[1])
    update = Pace.update
    monkeypatch.setattr(Pace, "update", lambda self, cost: (costs.append(cost), update(self, cost))[1])
    page = make_app(random_trace(1))()

    with concurrent.futures.ThreadPoolExecutor() as thread:
        thread.submit(asyncio.run, started[0]()).result()
    assert page.packet and costs == [7.0]


def test_the_views_of_a_class_share_what_all_may_take(monkeypatch):
    monkeypatch.setattr("workbench.viz.pace._open", set())
    monkeypatch.setattr("workbench.viz.pace.LONGEST_SECONDS", 1000.0)
    seconds = map(float, range(1000))  # an update takes one
    monkeypatch.setattr("workbench.viz.pace.time.thread_time", seconds.__next__)

    def pace_of(number):
        with contextlib.ExitStack() as views:
            *_, last = [views.enter_context(Pace()) for _ in range(number)]
            with last.update():
                pass
            return last.seconds

    assert [pace_of(number) for number in (1, 10, 30, 1)] == pytest.approx(
        [1 / SHARE, 1 / SHARE, 30 / SHARE_OF_ALL, 1 / SHARE]
    )

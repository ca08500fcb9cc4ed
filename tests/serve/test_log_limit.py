"""A log in which one failure repeats stays readable."""

import io
import logging
from types import SimpleNamespace

import pytest

from workbench.apps.serve import log_limit
from workbench.apps.serve.log_limit import RepeatFilter


@pytest.fixture
def log():
    """A log, and its text in ``written``."""
    log = logging.Logger("test")
    log.written = io.StringIO()
    handler = logging.StreamHandler(log.written)
    handler.addFilter(RepeatFilter())
    log.addHandler(handler)
    return log


def test_a_log_counts_what_repeats(log):
    for number in range(1000):
        try:
            raise OSError(number)
        except OSError:
            log.exception("accepting failed: %d", number)
        log.warning("x" * 20_000)
    log.error("something else")
    text = log.written.getvalue()
    assert text.count("Traceback") == 5 and "only counted" in text and "something else" in text
    assert len(text) < 60_000, "long lines are cut off"


def test_what_has_repeated_is_logged_again_later_with_its_number(log, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(log_limit, "time", clock)
    for clock.now in (*range(20), 61, 62):
        log.warning("again")
    *_, last_counted, after, later = log.written.getvalue().splitlines()
    assert last_counted == "again (more like this within 60 s are only counted)"
    assert (after, later) == ("again (and 15 more like this since)", "again")


def test_few_places_are_remembered():
    repeats = RepeatFilter()
    for line in range(3000):
        repeats.filter(logging.LogRecord("test", logging.ERROR, "file", line, "text", (), None))
        assert len(repeats._seen) <= log_limit.MAX_PLACES


def test_every_handler_of_the_process_gets_the_filter_once(monkeypatch):
    handler, last_resort = logging.NullHandler(), logging.NullHandler()
    log = logging.getLogger("a log of this test")
    log.addHandler(handler)
    monkeypatch.setattr(logging, "lastResort", last_resort)
    monkeypatch.setattr(logging.root.manager, "loggerDict", {log.name: log})
    monkeypatch.setattr(logging.root, "handlers", [])
    for _ in range(2):
        log_limit.limit_repeats()
    assert [len(one.filters) for one in (handler, last_resort)] == [1, 1]
    log.removeHandler(handler)

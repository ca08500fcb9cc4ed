"""Times as the command line and the pages write them: both by the same table."""

import json
import re
from pathlib import Path

import pytest
from pages_in_deno import DENO, Page

from workbench.base.text import duration
from workbench.trace.readings.metrics import amount
from workbench.viz.bundle import JS_DIRECTORY

CASES = json.loads((Path(__file__).parents[1] / "data" / "durations.json").read_text())


@pytest.mark.parametrize(("seconds", "text"), CASES)
def test_a_time_has_three_digits_and_the_unit_that_reads_best(seconds, text):
    assert duration(seconds) == amount(seconds, "s") == text


def test_a_time_as_a_number_is_within_half_of_its_last_digit():
    units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
    for exponent in range(-9, 5):
        for digits in range(1000, 10000, 37):
            seconds = digits * 10.0 ** (exponent - 3)
            number, unit = duration(seconds).split()
            assert float(number.replace(",", "")) * units[unit] == pytest.approx(seconds, rel=0.005)
            assert len(re.sub(r"\D", "", number).lstrip("0")) <= max(3, len(str(int(seconds))))


@pytest.mark.skipif(not DENO.exists(), reason="deno is not installed")
def test_the_pages_write_times_as_the_command_line_does():
    source = (JS_DIRECTORY / "dom.js").read_text().replace("export ", "")
    page = Page(f"{source}\nglobalThis.page.formatSeconds = formatSeconds;")
    try:
        times = [seconds for seconds, _ in CASES] + [
            k * 10.0**e for e in range(-7, 3) for k in (1, 1.005, 3.3333, 9.995)
        ]
        assert page("argument.map(page.formatSeconds)", times) == [duration(seconds) for seconds in times]
    finally:
        page.close()

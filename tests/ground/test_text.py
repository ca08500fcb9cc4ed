"""Times and numbers as the command line and the pages write them."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from pages_in_deno import DENO, Page

from workbench.analysis.causes import Cause, Part
from workbench.base.text import duration, significant
from workbench.simulation.costs.slow_steps import SlowStep
from workbench.trace.readings.metrics import amount
from workbench.trace.readings.two_sides import Measure
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


def test_a_number_has_its_digits_and_no_power_of_ten():
    expected = {
        0.0: "0",
        1.0: "1",
        0.05123: "0.0512",
        1.234e-6: "0.00000123",
        18.66: "18.7",
        99.96: "100",
        186.4: "186",
    }
    expected |= {1864.0: "1,864", 1.9e6: "1,900,000", -186.4: "-186", math.inf: "inf"}
    assert {value: significant(value) for value in expected} == expected
    assert (significant(194.4, 2), significant(9.96, 2), significant(123456.7, 4)) == ("194", "10", "123,457")
    rng = random.Random(0)
    for _ in range(2000):
        value, digits = rng.choice((-1, 1)) * 10 ** rng.uniform(-12, 15), rng.randint(2, 6)
        text = significant(value, digits)
        assert re.fullmatch(r"-?[\d,]+(\.\d+)?", text)
        assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))


def test_a_factor_of_hundreds_is_written_out():
    step = SlowStep(29, 8.23e-3, 42.3e-6, 1, 0.0)
    assert "195 times" in str(step) and "e+" not in str(step)
    part = Part.of(Cause("slow"), 1.0, (), (3,), 1234.0, ())
    assert part.words.endswith("(x1,234)")
    assert Measure("tokens", 1.0, 2500.0, "").words == "2,500 times as many"


@pytest.mark.skipif(not DENO.exists(), reason="deno is not installed")
def test_the_pages_write_times_as_the_command_line_does():
    source = (JS_DIRECTORY / "dom.js").read_text().replace("export ", "")
    page = Page(f"{source}\nObject.assign(globalThis.page, {{ formatNumber, formatSeconds }});")
    try:
        times = [seconds for seconds, _ in CASES] + [
            k * 10.0**e for e in range(-7, 3) for k in (1, 1.005, 3.3333, 9.995)
        ]
        assert page("argument.map(page.formatSeconds)", times) == [duration(seconds) for seconds in times]
        numbers = [number for time in times for number in (time * 1e3, time * 1.5e3) if number >= 1e-6]
        written = page("argument.map((number) => page.formatNumber(number))", numbers)
        assert written == [significant(number) for number in numbers]
    finally:
        page.close()

"""An alert at 12:08:03 can be looked up: every window takes a time of day, and answers print it."""

import re
from datetime import datetime, timedelta

import msgspec
import pytest

from workbench import CostModel, Trace, simulate
from workbench.apps.cli import main
from workbench.trace.clock import seconds_at, time_of_day
from workbench.trace.window import windows

BEGIN = datetime(2026, 1, 31, 23, 58, 30)


@pytest.fixture
def path(tmp_path):
    """A recording of four minutes around midnight."""
    requests = [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 5, "arrival_time": 2.0 * i} for i in range(120)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.05))
    trace.meta = msgspec.structs.replace(trace.meta, source="vllm 0.33.0", created=BEGIN.timestamp())
    trace.save(tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize(
    "text, seconds",
    [("23:59", 30), ("23:59:15", 45), ("0:00", 90), ("00:01:03", 153), ("2026-02-01 00:02:00", 210), ("23:50", -510)],
)
def test_a_time_of_day_is_found_across_midnight(text, seconds):
    assert seconds_at("--from", text, BEGIN.timestamp(), 240.0) == pytest.approx(seconds)
    if seconds > 0:
        shown = time_of_day(BEGIN.timestamp(), seconds, date=True)
        assert shown == (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    "text, said", [("12:08", "lasts from 2026-01-31 23:58:30 to 2026-02-01"), ("25:00", "12:08:03")]
)
def test_another_time_is_refused_with_the_range(text, said):
    with pytest.raises(ValueError, match=said):
        seconds_at("--from", text, BEGIN.timestamp(), 240.0)
    with pytest.raises(ValueError, match="does not say when it began"):
        seconds_at("--from", "12:08", 0.0, 240.0)


def test_commands_take_and_print_it(path, capsys):
    assert main(["trace", "info", str(path), "--from", "23:59", "--to", "00:00"]) == 0
    said = capsys.readouterr().out
    assert "from 2026-01-31 23:59:" in said and "(local time)" in said
    assert main(["trace", "explain", str(path), "r30"]) == 0
    assert "from arrival at 23:59:30 to its end" in capsys.readouterr().out
    assert main(["trace", "explain", str(path), "--slowest", "1", "--around", "00:00:10"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert "arrived" in head and re.search(r" 00:00:\d\d ", row)
    assert main(["why", str(path), "--to", "23:59:10.1"]) == 0
    assert "(2026-01-31 23:59:" in capsys.readouterr().out.splitlines()[0]
    part = windows({"": Trace.load(path)}, around="00:00:10")[""]
    assert 69 < part[0].time < 73 and 125 < part[-1].end <= 131
    assert main(["trace", "info", str(path), "--from", "11:00"]) == 2
    assert "--from 11:00 is not in the recording" in capsys.readouterr().err


def test_a_time_before_the_recording_is_that_time(path, capsys):
    """A window of it has what it covers of the recording, and nothing at all is an error that says when it lasted."""
    whole = Trace.load(path)
    part = windows({"": whole}, around="23:58:20")[""]
    assert part[0] == whole[0] and 18 < part[-1].end <= 20.1, "half a minute before and after 23:58:20"
    assert windows({"": whole}, around="23:58:40")[""][-1].end == pytest.approx(40, abs=2)
    for options in (
        ["--around", "23:50"],
        ["--around", "00:20"],
        ["--from", "23:50", "--to", "23:51"],
        ["--to", "23:58"],
    ):
        assert main(["trace", "info", str(path), *options]) == 2
        said = capsys.readouterr().err
        assert "no step lies" in said and re.search(r"the trace has .* \(23:58:30\) to .* \(00:02:2\d\)", said), said
    assert "no step lies before -30 s (23:58:00): " in said
    assert main(["trace", "info", str(path), "--from", "23:50", "--to", "23:59"]) == 0
    assert re.search(r"from 2026-01-31 23:58:3\d to 2026-01-31 23:58:5\d \(local", capsys.readouterr().out)
    assert main(["trace", "info", str(path), "--from", "00:20"]) == 2
    assert "(00:20:00) to" in capsys.readouterr().err


def test_a_trace_without_a_wall_clock_prints_none(tmp_path, capsys):
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]}, cost_model=CostModel(fixed=0.1))
    trace.save(tmp_path / "t.jsonl")
    assert main(["trace", "info", str(tmp_path / "t.jsonl")]) == 0
    assert "local time" not in capsys.readouterr().out

"""Changed logs in every format, and the shapes of recordings that once ended in a traceback."""

import json
from random import Random

import pytest
from hostile_logs import LOGS, try_one, try_scrapes
from hostile_recordings import SOURCES, run, source_lines
from tiers import examples

from workbench.simulation.access_log import read_access_log
from workbench.trace import Trace, TraceError


def test_logs_are_read_or_refused_by_name(tmp_path):
    outcomes, findings = [], []
    for seed in range(examples(400)):
        rng = Random(f"test {seed}")
        outcome, finding = try_one(rng, tmp_path)
        outcomes.append(outcome)
        findings += filter(None, [finding, try_scrapes(rng, tmp_path)])
    assert not findings, findings[0]
    assert len({outcome for outcome in outcomes if outcome.endswith(" read")}) > len(LOGS) / 2


def changed_step(change):
    """A recording with another step in the middle."""
    lines = [json.loads(line) for line in source_lines(SOURCES[0]).splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    change(steps[len(steps) // 2])
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step.update(time=1e308),
        lambda step: step.update(time=2e12),
        lambda step: step.update(end=1e308),
        lambda step: step["timings"].update(forward=1e308),
        lambda step: step["timings"].update(forward=2e12),
        lambda step: step.update(phase_starts={"forward": -1e308}),
        lambda step: (step.pop("timings"), step.update(phase_starts={"forward": 0.5})),
        lambda step: step.update(phase_starts={"elsewhere": 0.5}),
    ],
)
def test_times_beyond_all_bounds_are_refused_by_name(tmp_path, change):
    path = tmp_path / "t.jsonl"
    path.write_text(changed_step(change))
    with pytest.raises(TraceError, match=r"line|step"):
        Trace.load(path)
    for words in (["trace", "info"], ["trace", "explain"], ["why"]):
        assert run([*words, str(path), *(["--slowest", "1"] if "explain" in words else [])]) == "refused"


def test_times_within_the_bounds_are_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(changed_step(lambda step: step.update(phase_starts={"forward": 0.5}) or step.pop("end", None)))
    Trace.load(path).metrics()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 5}, "hash_ids must be a list of numbers"),
        (
            {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "5"},
            "hash_ids must be a list of numbers",
        ),
        ({"timestamp": 1e308, "input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp must be"),
        ({"timestamp": 1e308, "input_length": 5, "output_length": 1}, "timestamp must be"),
    ],
)
def test_scalars_and_large_times_in_a_log_are_refused_by_name(tmp_path, line, words):
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=words):
        read_access_log(tmp_path / "log.jsonl")

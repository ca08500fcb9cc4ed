"""The neutral files are those of the recordings, valid, and equal to the judge's schedules."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from workbench.analysis.certify.features import FEATURES, draw
from workbench.analysis.certify.neutral import judge, steps_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "fidelity/runs").glob("*.gz"))
WORKLOAD, SCHEDULE = (
    jsonschema.Draft202012Validator(json.loads((ROOT / f"fidelity/{name}.schema.json").read_text()))
    for name in ("workload", "schedule")
)


def runs(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_the_judge_decides_as_vllm_did(path):
    for run in runs(path):
        WORKLOAD.validate(run["workload"])
        SCHEDULE.validate({"steps": run["steps"]})
        trace = judge(run["workload"])
        assert (steps_of(trace), trace.end) == (run["steps"], run["end"]), run["workload"]["id"]


def test_the_files_are_current():
    command = [sys.executable, str(ROOT / "scripts/make_fidelity_suite.py"), "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


def test_the_page_of_the_files_counts_them():
    counts = {path.name: len(runs(path)) for path in FILES}
    assert sum(counts.values()) == 220 and counts["windows.jsonl.gz"] == 11 and counts["synchronous.jsonl.gz"] == 16


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_drawn_workloads_are_valid(feature):
    (made, trace), *_ = draw(feature, 1, random.Random(3))
    WORKLOAD.validate(made)
    SCHEDULE.validate({"steps": steps_of(trace)})

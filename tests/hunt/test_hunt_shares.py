"""Prompts share a budget: one that gets nothing, and a share that is not used, are found; each mutant has a reason."""

import json
import random
from pathlib import Path

import pytest

from workbench.analysis.hunt.target import Refused, find_target
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload
from workbench.scheduler.partial_prefills import PartialPrefills

ROOT = Path(__file__).parents[2]
ORDER = PartialPrefills.running_order


def last_one_first_alone(self, batch):
    return ORDER(self, batch)[:1]


def nothing_is_used_up(self, batch, budget, advance, admit):
    return budget


@pytest.mark.parametrize(
    "name, planted, law, place",
    [
        ("running_order", last_one_first_alone, "order", "a prompt in progress gets nothing"),
        ("rest", nothing_is_used_up, "utilisation", "a part of the budget is wasted"),
    ],
)
def test_prompts_share_the_budget(name, planted, law, place, monkeypatch):
    target, rng, faults = find_target("workbench"), random.Random(3), set()
    monkeypatch.setattr(PartialPrefills, name, planted)
    for _ in range(300):
        workload = make_workload(rng.randbytes(WORKLOAD_BYTES), {"chunks", "partial_prefills"})
        workload["config"] |= {"max_num_partial_prefills": 3, "max_num_batched_tokens": 16, "max_num_seqs": 8}
        try:
            fault = target.run(workload, [law])
        except (Refused, ValueError):
            continue
        faults |= {(fault.law, fault.place)} if fault else set()
    assert (law, place) in faults


def test_each_mutant_that_is_not_found_has_a_reason():
    told = json.loads((ROOT / "benchmarks" / "results" / "hunt_mutants.json").read_text())
    differ = [each for each in told["mutants"] if each["differs_after"] is not None]
    found = [each for each in differ if each["found"]]
    assert (told["num_that_differ"], told["num_found"]) == (len(differ), len(found))
    text = (ROOT / "docs" / "hunt.md").read_text()
    section = text[text.index("## Mutants") :].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    named = {(row[0].strip(" `"), row[1].strip()) for row in rows}
    survivors = {
        (each["function"], f"`{each['before']}` becomes `{each['after']}`") for each in differ if not each["found"]
    }
    assert named == survivors and all(row[2].strip() for row in rows)
    assert f"{len(differ)} of them change schedules, and the hunt finds {len(found)}" in section

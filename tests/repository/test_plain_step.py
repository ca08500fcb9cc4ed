"""A plain step needs no optional feature: importing any of their modules may raise."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from measure_structure import OPTIONAL_MODULES

from workbench.scheduler.chain import CHAIN

ROOT = Path(__file__).parents[2]
PLAIN = {"admission", "batch", "block_pool", "chain", "kv_cache_groups", "kv_cache_manager", "queues", "request"}
PLAIN |= {"scheduler", "policy"}  # the head of every trace says which policy is in force

HOOK = """
import sys
from importlib.abc import MetaPathFinder
optional = {optional!r}

class Off(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in optional):
            raise ImportError(f"off: {{name}}")

sys.meta_path.insert(0, Off())
{program}
"""

SCHEDULER = """
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
scheduler = Scheduler(EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=40, {fields}))
for number in range(6):
    scheduler.add_request(Request(f"r{{number}}", list(range(20 + number)), SamplingParams(max_tokens=8)))
while scheduler.has_unfinished_requests():
    batch = scheduler.schedule()
    scheduler.update(batch, [7 if chunk.samples else None for chunk in batch.chunks]).to_record()
assert scheduler.step > 8
"""

ENGINE = """
from workbench import Engine, EngineConfig
with Engine("smollm2", EngineConfig(max_num_batched_tokens=64, num_blocks=64, {fields})) as engine:
    engine.add_request("The capital of France is", max_tokens=4)
    engine.add_request("The opposite of hot is", max_tokens=2{request})
    assert [len(output.token_ids) for output in engine.run(progress=False)] == [4, 2]
"""


def run(program, **values):
    program = HOOK.format(optional=OPTIONAL_MODULES, program=program.format(**{"fields": "", "request": "", **values}))
    command, environment = [sys.executable, "-c", program], {**os.environ, "WORKBENCH_PREFLIGHT": "remembered"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("program", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
def test_a_plain_step_imports_no_feature(program):
    done = run(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "values", "module"),
    [
        (SCHEDULER, {"fields": "num_speculative_tokens=2"}, "workbench.scheduler"),
        (SCHEDULER, {"fields": "max_num_partial_prefills=2"}, "workbench.scheduler.partial_prefills"),
        (SCHEDULER, {"fields": "eviction='lfu'"}, "workbench.scheduler.eviction"),
        (ENGINE, {"fields": "record_top_tokens=2"}, "workbench.engine.keeping"),
        (ENGINE, {"request": ", prompt_logprobs=1"}, "workbench.engine.prompt_logprobs"),
    ],
)
def test_a_feature_does_import_its_module(program, values, module):
    done = run(program, **values)
    assert done.returncode != 0 and f"off: {module}" in done.stderr


def test_the_modules_are_there_and_nothing_of_the_scheduler_is_left_out():
    assert all(find_spec(name) is not None for name in OPTIONAL_MODULES)
    assert {f"workbench.scheduler.{link.module}" for link in CHAIN} <= set(OPTIONAL_MODULES)
    modules = {path.stem for path in (ROOT / "workbench" / "scheduler").glob("*.py")} - {"__init__"}
    optional = {name.rpartition(".")[2] for name in OPTIONAL_MODULES if name.startswith("workbench.scheduler.")}
    assert modules == PLAIN | optional and not PLAIN & optional

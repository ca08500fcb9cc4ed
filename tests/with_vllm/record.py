"""Record workloads in vLLM itself (``make record-vllm``).

Those of tests/data/vllm are recorded with token ids into tests/data/vllm-recorded; those of tests/data/vllm-private
twice, with token ids and by default, beside the workloads; and random ones with grammars and with
adapters into tests/data/vllm-grammars and tests/data/vllm-adapters. With arguments, only folders of these names are
made.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from feature_workloads import KINDS, random_workload
from real_vllm import drive, make_scheduler
from vllm_oracle import run_vllm

from workbench.simulation.workload import read_workload
from workbench.trace.recorders.vllm import AsyncRecordingScheduler, RecordingScheduler

DATA = Path(__file__).parents[1] / "data"
CLASSES = {"sync": RecordingScheduler, "async": AsyncRecordingScheduler}


def record(workload: Path, mode: str, folder: Path, *, token_ids: bool = True) -> Path:
    """Run a workload and return its one trace file in ``folder``."""
    config, arrivals = read_workload(workload)
    traces = folder / f"{workload.stem}-{mode}-{token_ids}"
    os.environ.update(WORKBENCH_TRACE_DIR=str(traces), WORKBENCH_TRACE_TOKENS=f"{token_ids:d}")
    scheduler = make_scheduler(CLASSES[mode], config)
    drive(scheduler, config, arrivals, depth=2 if mode == "async" else 1)
    scheduler.shutdown()
    (path,) = traces.iterdir()
    return path


def record_random(feature: str, num_workloads: int = 20) -> None:
    """Run random workloads of each kind with grammars or adapters; runs that an assertion ends are left out."""
    runs = []
    for kind in (kind for kind in KINDS if kind.endswith(feature)):
        for index in range(num_workloads):
            workload = random_workload(kind, random.Random(f"recorded {feature}s:{kind}:{index}"))
            steps, end = run_vllm(workload, 400)
            for step in steps:
                del step["sampling"]
            if end != "assertion":
                runs.append({"kind": kind, "workload": workload, "steps": steps, "end": end})
    target = DATA / f"vllm-{feature}s" / "runs.json.gz"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(gzip.compress(json.dumps(runs, separators=(",", ":")).encode(), mtime=0))
    print(target, len(runs))


def main() -> None:
    """Replace the recorded files."""
    chosen = sys.argv[1:] or ["vllm-recorded", "vllm-private", "vllm-grammars", "vllm-adapters"]
    for feature in ("grammar", "adapter"):
        if f"vllm-{feature}s" in chosen:
            record_random(feature)
    with tempfile.TemporaryDirectory() as folder:
        for workload in sorted((DATA / "vllm-private").glob("*.json")) if "vllm-private" in chosen else ():
            for mode in CLASSES:
                for token_ids, name in ((True, "tokens"), (False, "default")):
                    target = workload.with_name(f"{workload.stem}-{mode}-{name}.jsonl.gz")
                    shutil.copyfile(record(workload, mode, Path(folder), token_ids=token_ids), target)
                    print(target)
        if "vllm-recorded" not in chosen:
            return
        for workload in sorted((DATA / "vllm" / "workloads").glob("*.json")):
            for mode in CLASSES:
                target = DATA / "vllm-recorded" / mode / f"{workload.stem}.jsonl.gz"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(record(workload, mode, Path(folder)), target)
                print(target)


if __name__ == "__main__":
    main()

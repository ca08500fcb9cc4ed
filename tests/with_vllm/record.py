"""Record the workloads of tests/data/vllm in vLLM itself, into tests/data/vllm-recorded (``make record-vllm``)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from real_vllm import drive, make_scheduler

from workbench.integrations.vllm import AsyncRecordingScheduler, RecordingScheduler
from workbench.simulation.workload import read_workload

DATA = Path(__file__).parents[1] / "data"
CLASSES = {"sync": RecordingScheduler, "async": AsyncRecordingScheduler}


def record(workload: Path, mode: str, folder: Path) -> Path:
    """Run a workload and return its one trace file in ``folder``."""
    config, arrivals = read_workload(workload)
    traces = folder / f"{workload.stem}-{mode}"
    os.environ.update(WORKBENCH_TRACE_DIR=str(traces), WORKBENCH_TRACE_TOKENS="1")
    scheduler = make_scheduler(CLASSES[mode], config)
    drive(scheduler, config, arrivals, depth=2 if mode == "async" else 1)
    scheduler.shutdown()
    (path,) = traces.iterdir()
    return path


def main() -> None:
    """Replace the recorded files."""
    with tempfile.TemporaryDirectory() as folder:
        for workload in sorted((DATA / "vllm" / "workloads").glob("*.json")):
            for mode in CLASSES:
                target = DATA / "vllm-recorded" / mode / f"{workload.stem}.jsonl.gz"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(record(workload, mode, Path(folder)), target)
                print(target)


if __name__ == "__main__":
    main()

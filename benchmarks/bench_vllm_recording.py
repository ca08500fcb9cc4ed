"""The cost of recording for vLLM's scheduler: CPU time of schedule() + update_from_output(), with and without.

    make measure-vllm
    make measure-vllm ARGS="--other ../base"     # also the recorder of another checkout, interleaved

The same workload runs alternately through vLLM's Scheduler and through RecordingScheduler: ``--seqs`` requests at once,
each replaced by another when it ends, so that steps contain decodes, some prefills, admissions and ends. Log
statistics are on, as on a server. The measurement is the CPU time of the scheduler's thread.

For each scheduler, many processes are forked from one that has imported vLLM. Each process shuffles its memory and
takes the same steps several times. The fastest time of each step counts ("floor"). This removes the effects of other
programs and of the memory layout of a process, both of which are larger than the cost of a recording. (The median
process is printed as well; on a shared machine it shows the other programs.) Messages are sent in the same steps of
every turn, as often as with a model whose step takes 5 ms. "Again" compares vLLM's scheduler with itself: its
difference is the error of the measurement.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from _common import RESULTS, save

PAIRS = (
    (("vllm.v1.core.sched.scheduler", "Scheduler"), ("workbench.trace.recorders.vllm", "RecordingScheduler")),
    (
        ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
        ("workbench.trace.recorders.vllm", "AsyncRecordingScheduler"),
    ),
)

ARMS = ("vllm", "again", "recorded", "recorded by the other checkout")

BLOCK_STEPS = 100
"""Number of steps that a process takes at a time."""

SETTLE_SECONDS = 2.5
"""Seconds for the writer processes to start."""

PRELOAD = ["bench_vllm_recording", "vllm.v1.core.sched.async_scheduler"]
"""Modules to import before the processes are forked; each process then imports the recorder of its checkout."""

HERE = Path(__file__).parents[1]

SEND_STEPS = 20
"""Steps between two sends, as the recorder sends every 0.1 s and a step takes 5 ms.

If a clock decided, each turn would send in other steps, and the fastest would have none.
"""


def arrivals_for_ever(random: Random) -> Any:
    """Requests of 200 to 800 prompt tokens and 100 to 300 output tokens."""
    from workbench.config import SamplingParams
    from workbench.simulation.arrivals import Arrival

    number = 0
    while True:
        prompt = [random.randrange(3, 32000) for _ in range(random.randrange(200, 800))]
        sampling = SamplingParams(max_tokens=random.randrange(100, 300))
        yield Arrival(f"cmpl-{random.getrandbits(128):032x}-{number}", prompt, sampling)
        number += 1


class Run:
    """A scheduler that is kept full, with the CPU seconds of its steps."""

    def __init__(self, scheduler_class: type, num_seqs: int, seed: int) -> None:
        from real_vllm import FakeModel, make_request, make_scheduler

        from workbench.config import EngineConfig

        self.config = EngineConfig(
            max_num_batched_tokens=8192, max_num_seqs=num_seqs, block_size=16, num_blocks=num_seqs * 80
        )
        self.scheduler = make_scheduler(scheduler_class, self.config, log_stats=True)
        self.depth = 2 if "Async" in scheduler_class.__name__ else 1
        self.source = arrivals_for_ever(Random(seed))
        self.model, self.make_request = FakeModel(), make_request
        self.under_way: list[Any] = []
        self.num_seqs = num_seqs
        self.num_steps = 0

    def step(self) -> float:
        """Take a step and return the CPU seconds of all calls to the scheduler."""
        scheduler, spent = self.scheduler, 0.0
        self.num_steps += 1
        if recorder := getattr(scheduler, "recorder", None):
            recorder.quiet_until = recorder._send_at = float("-inf" if self.num_steps % SEND_STEPS == 0 else "inf")
        while sum(scheduler.get_request_counts()) < self.num_seqs:
            request = self.make_request(next(self.source), self.config)
            begin = time.thread_time()
            scheduler.add_request(request)
            spent += time.thread_time() - begin
        begin = time.thread_time()
        output = scheduler.schedule()
        spent += time.thread_time() - begin
        self.under_way.append((output, self.model.run(scheduler, output)))
        if len(self.under_way) == self.depth:
            done = self.under_way.pop(0)
            begin = time.thread_time()
            scheduler.update_from_output(*done)
            spent += time.thread_time() - begin
        return spent


def work(pipe: Connection, checkout: Path, module: str, name: str, num_seqs: int, seed: int) -> None:
    """A process with a scheduler of one class, because Python's inline caches serve one class of ``self``."""
    sys.path[:0] = [str(checkout), str(checkout / "tests" / "with_vllm")]
    importlib.import_module(module)
    gc.freeze()  # as vLLM does
    random = Random(seed)
    kept = [bytes(random.randrange(512)) for _ in range(random.randrange(20_000))]
    del kept[::2]  # other objects lie between these
    run = None
    while (num_steps := pipe.recv()) is not None:
        if num_steps == 0:
            end(run)
            run = Run(getattr(importlib.import_module(module), name), num_seqs, 0)
            num_steps = num_seqs // 4  # until the batch is full
        pipe.send([run.step() for _ in range(num_steps)])
    end(run)


def end(run: Run | None) -> None:
    """Release the writer of a run without waiting for it."""
    if run is not None and (recorder := getattr(run.scheduler, "recorder", None)):
        if recorder.writer is None:
            raise RuntimeError("the recording stopped, so there is nothing to compare")
        recorder.writer.close(wait=False)


def step_seconds(classes: list[tuple[Path, str, str]], num_seqs: int, options: Any) -> list[list[list[float]]]:
    """CPU seconds of the same steps in each process of each class; the processes of a round take steps alternately."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    seconds: list[list[list[float]]] = [[] for _ in classes]
    for number in range(options.processes):
        processes, best = [], [[float("inf")] * options.steps for _ in classes]
        for kind, which in enumerate(classes):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, *which, num_seqs, number * len(classes) + kind))
            process.start()
            processes.append((process, here))
        for _ in range(options.turns):
            for _, pipe in processes:
                pipe.send(0)
            for _, pipe in processes:
                pipe.recv()
            time.sleep(SETTLE_SECONDS)
            for first in range(0, options.steps, BLOCK_STEPS):
                order = list(zip(best, processes, strict=True))
                turn = first // BLOCK_STEPS % len(order)
                for times, (_, pipe) in (*order[turn:], *order[:turn]):
                    pipe.send(BLOCK_STEPS)
                    for step, spent in enumerate(pipe.recv(), start=first):
                        times[step] = min(times[step], spent)
        for (process, pipe), times, of_class in zip(processes, best, seconds, strict=True):
            pipe.send(None)
            process.join()
            of_class.append(times)
    return seconds


def main() -> None:
    """Print the cost of a step without a recording, and the cost that the recording adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=[16, 64, 256], help="requests at once")
    parser.add_argument("--steps", type=int, default=300, help=f"steps measured, a multiple of {BLOCK_STEPS}")
    parser.add_argument("--processes", type=int, default=12, help="processes with each scheduler")
    parser.add_argument("--turns", type=int, default=3, help="number of times each process takes each step")
    parser.add_argument("--other", type=Path, help="another checkout, whose recorder is measured as well")
    parser.add_argument("--kinds", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    options = parser.parse_args()
    path = RESULTS / "vllm_recording.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}  # keep rows that are not measured this time
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_TRACE_DIR"] = folder
        for kind, (base, recorded) in zip(("sync", "async"), PAIRS, strict=True):
            for num_seqs in options.seqs if kind in options.kinds else ():
                classes = [(HERE, *base), (HERE, *base), (HERE, *recorded)]
                if options.other:
                    classes.append((options.other.resolve(), *recorded))
                seconds = step_seconds(classes, num_seqs, options)
                arms = {name: summary(of_class) for name, of_class in zip(ARMS, seconds)}
                sizes = {name: getattr(options, name) for name in ("steps", "processes", "turns")}
                scene = f"{base[1]}, {num_seqs} requests" + (", beside another checkout" if options.other else "")
                rows[scene] = {**sizes, "us_per_step": arms}
                print(f"{base[1]}, {num_seqs} requests: {arms['vllm']['floor']:.1f} us a step")
                for name in list(arms)[1:]:
                    ratios = (f"{key} {arms[name][key] / arms['vllm'][key] - 1:+.2%}" for key in arms[name])
                    print(f"  {name:9}", ", ".join(ratios), flush=True)
    save("vllm_recording", {"rows": rows})


def summary(processes: list[list[float]]) -> dict[str, float]:
    """CPU microseconds per step: the fastest of each step, and those of the median process."""
    scale = 1e6 / len(processes[0])
    return {
        "floor": scale * sum(map(min, zip(*processes))),
        "median": scale * statistics.median(sum(times) for times in processes),
    }


if __name__ == "__main__":
    main()

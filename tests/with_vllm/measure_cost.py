"""What recording costs vLLM's scheduler: CPU time of schedule() + update_from_output(), with and without.

    make measure-vllm

The same workload runs through vLLM's Scheduler and through RecordingScheduler in turns: ``--seqs`` requests at once,
each ended one replaced by another, so that a step holds decodes, a prefill now and then, admissions and ends. Log
statistics are on, as on a server. What is added up is the CPU time of the scheduler's own thread. Every turn takes the
same steps, in processes that are started again for every round, and of each step the fastest turn counts: neither what
other programs do to the caches nor where a process happens to keep its objects shows in a sum, and both are worth more
than a recording. It sends what it has collected in the same steps of every turn, as often as with a model whose step
takes 5 ms. The line "again" compares vLLM's scheduler with itself: the difference it shows is the error of the others.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from real_vllm import FakeModel, make_request, make_scheduler

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.workload import Arrival
from workbench.integrations.recorder.recorder import SEND_SECONDS

PAIRS = (
    (("vllm.v1.core.sched.scheduler", "Scheduler"), ("workbench.integrations.vllm", "RecordingScheduler")),
    (
        ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
        ("workbench.integrations.vllm", "AsyncRecordingScheduler"),
    ),
)

BLOCK_STEPS = 20
"""Steps that a process takes at a time."""

SEND_STEPS = round(SEND_SECONDS / 0.005)
"""Steps between two sends. Sent by the clock, each turn would send in other steps and the fastest would show none."""


def arrivals_for_ever(random: Random) -> Any:
    """Requests of 200 to 800 prompt tokens and 100 to 300 output tokens."""
    number = 0
    while True:
        prompt = [random.randrange(3, 32000) for _ in range(random.randrange(200, 800))]
        sampling = SamplingParams(max_tokens=random.randrange(100, 300))
        yield Arrival(f"cmpl-{random.getrandbits(128):032x}-{number}", prompt, sampling)
        number += 1


class Run:
    """A scheduler that is kept full, and the CPU seconds of its steps."""

    def __init__(self, scheduler_class: type, num_seqs: int, seed: int, folder: str) -> None:
        self.config = EngineConfig(
            max_num_batched_tokens=8192, max_num_seqs=num_seqs, block_size=16, num_blocks=num_seqs * 80
        )
        self.scheduler = make_scheduler(scheduler_class, self.config, Path(folder), log_stats=True)
        self.depth = 2 if "Async" in scheduler_class.__name__ else 1
        self.source = arrivals_for_ever(Random(seed))
        self.model = FakeModel()
        self.under_way: list[Any] = []
        self.num_seqs = num_seqs
        self.num_steps = 0

    def step(self) -> float:
        """Take a step; returns the CPU seconds of everything the scheduler was asked to do."""
        scheduler, spent = self.scheduler, 0.0
        self.num_steps += 1
        if recorder := getattr(scheduler, "recorder", None):
            recorder._sent_at = float("-inf" if self.num_steps % SEND_STEPS == 0 else "inf")
        while sum(scheduler.get_request_counts()) < self.num_seqs:
            request = make_request(next(self.source), self.config)
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


def work(pipe: Connection) -> None:
    """A process with a scheduler of one class. Python's inline caches are good for one class of ``self``."""
    run, folder = None, tempfile.TemporaryDirectory()
    with folder:
        while (request := pipe.recv()) is not None:
            if isinstance(request, tuple):
                module, name, num_seqs = request
                if run is not None:
                    run.scheduler.shutdown()
                run = Run(getattr(importlib.import_module(module), name), num_seqs, 0, folder.name)
                pipe.send(None)
            else:
                pipe.send([run.step() for _ in range(request)])
        run.scheduler.shutdown()


def total_seconds(classes: list[tuple[str, str]], num_seqs: int, options: Any) -> list[float]:
    """CPU seconds of the same steps for each class; the processes take a few steps each in turns."""
    best = [[float("inf")] * options.steps for _ in classes]
    for _ in range(options.rounds):
        workers = [start_worker() for _ in classes]
        for _ in range(options.turns):
            for worker, (module, name) in zip(workers, classes, strict=True):
                worker.send((module, name, num_seqs))
                worker.recv()
                worker.send(num_seqs // 4)  # the batch fills up
                worker.recv()
            for first in range(0, options.steps, BLOCK_STEPS):
                order = list(zip(best, workers, strict=True))
                turn = first // BLOCK_STEPS % len(order)
                for times, worker in (*order[turn:], *order[:turn]):
                    worker.send(BLOCK_STEPS)
                    for step, spent in enumerate(worker.recv(), start=first):
                        times[step] = min(times[step], spent)
        for worker in workers:
            worker.send(None)
    return [sum(times) for times in best]


def start_worker() -> Connection:
    """The pipe to a new process that takes steps."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=work, args=(there,), daemon=True).start()
    return here


def main() -> None:
    """Print what a step costs without a recording, and what the recording adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=[16, 64, 256], help="requests at once")
    parser.add_argument("--steps", type=int, default=300, help=f"steps measured, a multiple of {BLOCK_STEPS}")
    parser.add_argument("--rounds", type=int, default=5, help="times that the processes are started")
    parser.add_argument("--turns", type=int, default=3, help="times that each of them takes each step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_TRACE_DIR"] = folder
        for base, recorded in PAIRS:
            for num_seqs in options.seqs:
                plain, *others = total_seconds([base, base, recorded], num_seqs, options)
                print(f"{base[1]}, {num_seqs} requests: {1e6 * plain / options.steps:.0f} us a step")
                for name, seconds in zip(("again", "recorded"), others, strict=True):
                    more = seconds - plain
                    print(f"  {name:10} {1e6 * more / options.steps:+8.1f} us {100 * more / plain:+6.2f} %", flush=True)


if __name__ == "__main__":
    main()

"""A process that serves made-up requests, records itself and stands still once: ``stalled_process.py SEED KIND CLOCK``.

The scheduler is the double of vLLM's, the recorder is the one for vLLM, and a step takes as long as a roofline says. By
the machine's clock (CLOCK is "real") it sleeps that long. By a made clock ("made"), which the recorder reads too, only
the steps and the stall take time, however busy the machine is. The process prints what happened by its clock, as JSON.

    planted: {"step", "seconds", "place"} of the stall; null for the kind "none"
    priced: the seconds that the roofline gives to each step
    took: the seconds of each step, from the end of the one before: more on a busy machine, by its clock
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import vllm_double
from vllm_recordings import RecordingDouble

from workbench.simulation.workload import read_workload
from workbench.trace.recorders import recorder as recorder_module
from workbench.trace.recorders import vllm as vllm_module

KINDS = ("sleep", "gc", "stop")
PLACES = ("before", "schedule", "forward", "update")
"""The places of a stall: between two steps, in the scheduler, in the model, or when the output is taken in."""


def workload(rng: random.Random) -> dict[str, Any]:
    """Six to fourteen requests, of which the later ones arrive while the first ones run."""
    return {
        "config": {
            "block_size": 16,
            "num_blocks": 800,
            "max_num_batched_tokens": rng.choice([64, 128, 512]),
            "max_num_seqs": rng.choice([4, 8, 32]),
        },
        "requests": [
            {
                "id": f"r{n}",
                "prompt": {"len": rng.randint(5, 400)},
                "max_tokens": rng.randint(60, 120) if n < 2 else rng.randint(5, 60),
                "arrival_step": 0 if n < 2 else rng.randint(0, 60),
            }
            for n in range(rng.randint(6, 14))
        ],
    }


class RealClock:
    """The machine's clock."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)

    def collect(self, seconds: float) -> None:
        """Collect garbage for a time."""
        garbage = [[] for _ in range(500_000)]
        until = self.now() + seconds
        while self.now() < until:
            gc.collect()
        del garbage

    def stop(self, seconds: float) -> None:
        """Stop the process until another one continues it."""
        # Again and again: on a busy machine the first signal may come before the stop.
        again = f"sleep {seconds}; while kill -CONT {os.getpid()}; do sleep 0.05; done"
        with subprocess.Popen(["sh", "-c", again]) as waker:
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.terminate()


class MadeClock(RealClock):
    """A clock that only `sleep`, `collect` and `stop` move; the recorder reads it in place of the machine's."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()
        recorder_module.perf_counter = vllm_module.perf_counter = self.now

    def now(self) -> float:
        return self._seconds

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds

    def collect(self, seconds: float) -> None:
        """Collect garbage once; it takes ``seconds`` by this clock."""

        def take_long(phase: str, _: dict[str, int]) -> None:
            self._seconds += seconds * (phase == "stop")

        gc.callbacks.insert(0, take_long)  # before the recorder looks at the clock
        gc.collect()
        gc.callbacks.remove(take_long)

    def stop(self, seconds: float) -> None:
        """Stop the process for a moment, which takes ``seconds`` by this clock."""
        super().stop(0.01)
        self._seconds += seconds


class Machine:
    """Steps of a roofline with noise, one of which stalls.

    Args:
        rng: Draws the roofline, the noise, and the step, the place and the length of the stall.
        kind: One of KINDS, or "none".
        clock: Tells the time, and lets it pass.
    """

    def __init__(self, rng: random.Random, kind: str, clock: RealClock) -> None:
        self.clock = clock
        self.fixed, self.per_row = rng.uniform(0.005, 0.015), rng.uniform(1e-5, 4e-5)
        self.noise, self.rng, self.kind = rng.uniform(0.0, 0.1), rng, kind
        self.at, self.place, self.length = rng.randint(30, 55), rng.choice(PLACES), rng.uniform(0.3, 0.8)
        self.num_steps, self.stalled = 0, 0.0
        self.priced: list[float] = []
        self.ends = [clock.now()]

    def attach(self, scheduler: Any) -> None:
        """Let the steps of a scheduler take their time."""
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def step(*args: Any) -> Any:
            self.num_steps += 1
            self._stall_in("before")
            return schedule(*args)

        def take(output: Any, result: Any) -> None:
            self._forward(output.total_num_scheduled_tokens)
            self._stall_in("forward")
            update(output, result)
            self.ends.append(self.clock.now())

        scheduler.schedule, scheduler.update_from_output = step, take
        self._wrap(scheduler.inner, "schedule", "schedule")
        self._wrap(scheduler.inner, "update", "update")

    def _wrap(self, scheduler: Any, name: str, place: str) -> None:
        method: Callable[..., Any] = getattr(scheduler, name)

        def wrapped(*args: Any) -> Any:
            self._stall_in(place)
            return method(*args)

        setattr(scheduler, name, wrapped)

    def _forward(self, rows: int) -> None:
        seconds = (self.fixed + self.per_row * rows) * math.exp(self.rng.gauss(0.0, self.noise))
        self.priced.append(seconds)
        self.clock.sleep(seconds)

    def _stall_in(self, place: str) -> None:
        if self.kind == "none" or self.num_steps != self.at or self.place != place:
            return
        before = self.clock.now()
        {"sleep": self.clock.sleep, "gc": self.clock.collect, "stop": self.clock.stop}[self.kind](self.length)
        self.stalled = self.clock.now() - before

    def what_happened(self) -> dict[str, Any]:
        """The stall and the durations of the steps, by this process's clock."""
        planted = {"step": self.at - 1, "seconds": self.stalled, "place": self.place} if self.kind != "none" else None
        return {"planted": planted, "priced": self.priced, "took": [end - begin for begin, end in pairwise(self.ends)]}


def main(seed: int, kind: str, clock: str) -> None:
    """Serve, stand still once, and say so."""
    rng = random.Random(seed)
    config, arrivals = read_workload(workload(rng))
    machine = Machine(rng, kind, MadeClock() if clock == "made" else RealClock())
    gc.disable()
    scheduler = RecordingDouble(config)
    machine.attach(scheduler)
    vllm_double.drive(scheduler, arrivals)
    scheduler.shutdown()
    print(json.dumps(machine.what_happened()))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

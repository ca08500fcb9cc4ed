"""A real model under mixed traffic for a long time: nothing may leak, nothing may be lost, no token may change.

Run: `python tests/soak/engine.py --minutes 30`. Writes tests/soak/results/engine.json and prints it; the exit status
is 1 if a check fails. Needs Linux, because it reads /proc.

One engine lives from beginning to end, with too few KV blocks, so that requests are preempted. Requests of random
shape arrive, are sampled with all kinds of parameters, aborted and forgotten; now and then a forward pass or a sampler
fails. Half of the requests have an answer that was computed alone beforehand, and must get it again. Engines of other
configurations are created and closed beside it. The trace keeps its newest steps, and is regularly saved and read back.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from law_runs import assert_laws
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.trace import StepRecord

import mlx.core as mx  # isort: skip (the BLAS is put in place before MLX is imported)

CONFIG = EngineConfig(max_num_batched_tokens=64, max_num_seqs=12, block_size=8, num_blocks=72, watermark=0.02)
SHORT_LIVED = (
    EngineConfig(max_num_batched_tokens=32, block_size=1, num_blocks=400, enable_prefix_caching=False),
    EngineConfig(max_num_batched_tokens=24, num_blocks=40, max_num_partial_prefills=2, max_long_partial_prefills=1),
    EngineConfig(
        max_num_batched_tokens=128, block_size=64, num_blocks=20, policy="priority", attention_backend="gather"
    ),
    EngineConfig(
        max_num_batched_tokens=512, enable_chunked_prefill=False, num_blocks=60, scheduler_reserve_full_isl=False
    ),
    EngineConfig(max_num_batched_tokens=16, long_prefill_token_threshold=8, num_blocks=50, attention_backend="dense"),
)
KEEP_STEPS = 2000
STEPS_PER_DRAIN = 2000
MAX_OPEN = 40
WARM_UP_TENTHS = 2
"""Tenths of the run in which memory may grow: six minutes of thirty."""

RSS_LIMIT = 0.02
"""Largest change of resident memory after the warm-up, as a fraction."""

MLX_CACHE_BYTES = 2**20
"""Limit of the freed buffers that MLX keeps for later arrays. MLX's default on a CPU is 32 MiB, and small arrays of
ever new shapes take longer than the run to fill it: growth that ends, but does not look like it. This smaller cache is
full before the traffic begins, so that later growth has another cause."""


class PlantedFault(RuntimeError):
    """Raised by the faulty forward passes and samplers."""


class Sample(NamedTuple):
    """Memory and objects of the process at one moment.

    Attributes:
        rss: Resident memory in bytes.
        mlx_cache: Bytes of freed buffers that MLX keeps.
        objects: Python objects that the garbage collector follows.
        blocks: Blocks of Python's allocator in use: numbers and strings too, which the collector does not follow.
    """

    rss: int
    mlx_cache: int
    objects: int
    blocks: int

    @classmethod
    def take(cls) -> Sample:
        gc.collect()
        return cls(resident_bytes(), mx.get_cache_memory(), len(gc.get_objects()), sys.getallocatedblocks())


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def draw_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt, of which about every third shares a prefix, and sampling parameters by name."""
    prompt = [rng.randrange(3, 120) for _ in range(rng.randint(1, 120))]
    if rng.random() < 0.3:
        prompt = [7 + rng.randrange(4)] * rng.choice((8, 24, 64)) + prompt
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 48), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        fields |= {"temperature": rng.choice((0.3, 1.0, 2.0)), "seed": rng.randrange(1000), "top_k": rng.choice((0, 5))}
        fields |= {"top_p": rng.choice((1.0, 0.9)), "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.2:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {5: 2.0}}
    if rng.random() < 0.2:
        fields["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.2:
        fields["stop"] = [f" w{rng.randrange(3, 120)}"]
    return prompt, fields


class Soak:
    """One long-lived engine, its traffic, and counts of both."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.engine = Engine(make_tiny_llama(), CONFIG, keep_steps=KEEP_STEPS)
        self.counts: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        """Number of times that each known request has ended."""
        self.expected: dict[str, tuple[int, ...]] = {}
        self.problems: list[str] = []
        self.known = [(*request, self._alone(request)) for request in (draw_request(self.rng) for _ in range(200))]
        self.engine.on_step(self._count)
        self._plant_faults()

    def _alone(self, request: tuple[list[int], dict[str, Any]]) -> tuple[int, ...]:
        self.engine.add_request(request[0], SamplingParams(**request[1]))
        [output] = self.engine.run(progress=False)
        self.engine.forget(output.request_id)
        return output.token_ids

    def _plant_faults(self) -> None:
        """Let one in a thousand forward passes and samplers raise."""
        for owner, name in ((self.engine.runner, "forward"), (self.engine.sampler, "sample")):
            work = getattr(owner, name)

            def faulty(*arguments: Any, work: Any = work, name: str = name) -> Any:
                if self.rng.random() < 0.001:
                    self.counts[f"planted_{name}_faults"] += 1
                    raise PlantedFault(name)
                return work(*arguments)

            setattr(owner, name, faulty)

    def _count(self, record: StepRecord) -> None:
        self.counts["steps"] += 1
        self.counts["tokens"] += record.num_tokens
        self.counts["preemptions"] += len(record.preempted)
        self.counts["cached_tokens"] += sum(chunk.num_cached_tokens for chunk in record.chunks)
        for request_id in (*record.finished, *record.aborted):
            if request_id in self.ended:
                self.ended[request_id] += 1
            else:
                self.problem(f"{request_id} ended in step {record.step}, after it was gone")

    def problem(self, text: str) -> None:
        """Note a problem; the first hundred are kept."""
        if len(self.problems) < 100:
            self.problems.append(text)

    # -- traffic -----------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add a request whose answer is known, or one of random shape."""
        if self.rng.random() < 0.5:
            prompt, fields, answer = self.rng.choice(self.known)
            request_id = self.engine.add_request(prompt, SamplingParams(**fields))
            self.expected[request_id] = answer
        else:
            prompt, fields = draw_request(self.rng)
            request_id = self.engine.add_request(prompt, **fields)
        self.ended[request_id] = 0
        self.counts["requests"] += 1

    def burst(self) -> None:
        """One round of traffic: arrivals, an abort, and steps taken in one of several ways."""
        for _ in range(min(self.rng.randint(0, 8), MAX_OPEN - len(self.ended))):
            self.arrive()
        if self.ended and self.rng.random() < 0.1:
            self.engine.abort(self.rng.choice(list(self.ended)))
            self.counts["aborts_asked_for"] += 1
        way = self.rng.random()
        if way < 0.05:
            self.engine.run(progress=False)
        elif way < 0.1:
            self.engine.start()
            adding = threading.Thread(target=self.arrive)
            adding.start()
            adding.join()
            self.engine.pause()
        elif way < 0.2:
            for _ in range(7):  # stops between the phases of a step, which step() then finishes
                self.engine.step_into()
            self.engine.step()
        else:
            for _ in range(self.rng.randint(1, 20)):
                self.engine.step()
        self.settle()

    def settle(self) -> None:
        """Compare finished requests with their expected answers, and forget them."""
        outputs = self.engine.outputs
        for request_id, output in outputs.items():
            if output.finish_reason is None:
                continue
            self.engine.forget(request_id)
            self.counts[f"ended_{output.finish_reason}"] += 1
            if (times := self.ended.pop(request_id)) != 1:
                self.problem(f"{request_id} ended {times} times ({output.finish_reason})")
            answer = self.expected.pop(request_id, None)
            if answer is not None and output.finish_reason not in ("abort", "error"):
                self.counts["answers_compared"] += 1
                if answer != output.token_ids:
                    self.problem(f"{request_id} got {output.token_ids} and not {answer}")
            if output.finish_reason == "error" and "PlantedFault" not in output.error:
                self.problem(f"{request_id} ended with {output.error!r}")

    def drain(self) -> None:
        """Finish all requests; then all KV blocks must be free and the scheduler consistent."""
        self.engine.run(progress=False)
        self.settle()
        scheduler = self.engine.scheduler
        free = scheduler.num_free_blocks
        if free != CONFIG.num_usable_blocks or self.ended or self.engine.outputs:
            self.problem(
                f"drained: {free} blocks free, {len(self.ended)} requests open, {len(self.engine.outputs)} kept"
            )
        try:
            assert_laws(scheduler)
        except AssertionError as problem:
            self.problem(f"drained: {problem}")
        self.ended.clear()
        self.counts["drains"] += 1

    def save_the_trace(self) -> None:
        """Save the trace and read it back."""
        path, trace = self.folder / "soak.jsonl.gz", self.engine.trace
        trace.save(path)
        if len(Trace.load(path)) != len(trace) or len(trace) > KEEP_STEPS:
            self.problem(f"a trace of {len(trace)} steps came back with another length, or is too long")
        self.counts["traces_saved"] += 1

    def live_briefly(self) -> None:
        """Make another engine with its own model, use it, close it."""
        config = SHORT_LIVED[self.counts["short_lived_engines"] % len(SHORT_LIVED)]
        with Engine(make_tiny_llama(), config) as engine:
            for prompt, fields, _ in self.rng.sample(self.known, 4):
                engine.add_request(prompt, SamplingParams(**fields), priority=self.rng.randint(0, 3))
            engine.run(progress=False)
            if engine.scheduler.num_free_blocks != config.num_usable_blocks:
                self.problem(f"{engine!r} kept blocks")
        self.counts["short_lived_engines"] += 1


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Run the traffic for a time, and report."""
    samples: list[Sample] = []
    mx.set_cache_limit(MLX_CACHE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(seed, Path(folder))
        start = time.monotonic()
        next_sample = next_engine = 0.0
        while (elapsed := time.monotonic() - start) < 60 * minutes:
            run.burst()
            if run.counts["steps"] >= (run.counts["drains"] + 1) * STEPS_PER_DRAIN:
                run.drain()
                run.save_the_trace()
            if elapsed >= next_engine:
                run.live_briefly()
                next_engine = elapsed + 20
            if elapsed >= next_sample:
                samples.append(Sample.take())
                next_sample = elapsed + 60 * minutes / 360
        run.drain()
        run.engine.close()
    return report(run, samples, minutes)


def report(run: Soak, samples: list[Sample], minutes: float) -> dict[str, Any]:
    """The result, ready for JSON. Memory is compared by medians of tenths of the run, of which two are the warm-up."""
    tenths = [samples[len(samples) * i // 10 : len(samples) * (i + 1) // 10] for i in range(10)]
    rss, mlx_cache, objects, blocks = (
        [statistics.median(values) for values in column] for column in zip(*(zip(*tenth) for tenth in tenths))
    )
    change = max(abs(value / rss[WARM_UP_TENTHS] - 1) for value in rss[WARM_UP_TENTHS:])
    if change > RSS_LIMIT:
        run.problem(f"resident memory changed by {change:.1%} after the warm-up, allowed are {RSS_LIMIT:.0%}")
    return {
        "minutes": minutes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "counts": dict(sorted(run.counts.items())),
        "rss_mib_by_tenth": [round(value / 2**20, 1) for value in rss],
        "rss_change_after_warm_up": round(change, 4),
        "mlx_cache_mib_by_tenth": [round(value / 2**20, 2) for value in mlx_cache],
        "python_objects_by_tenth": [int(value) for value in objects],
        "python_blocks_by_tenth": [int(value) for value in blocks],
        "open_files": num_open_files(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "problems": run.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine.json")
    options = parser.parse_args()
    logging.getLogger("workbench").setLevel(logging.CRITICAL)  # the planted faults are logged, thousands of them
    result = soak(options.minutes, options.seed)
    text = json.dumps(result, indent=2)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

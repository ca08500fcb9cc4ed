"""Speculative decoding and asynchronous steps against the same engine without them, on SmolLM2.

Each pair has two arms that compute the same tokens, which the script checks:

- copy: up to 5 n-gram drafts on texts that repeat (quotes, an edit of code), one request at a time
- copy_2, copy_3, copy_4, copy_8: the same with up to 2, 3, 4 or 8 drafts
- copy_16: the same with 16 requests at once, where the rows of rejected drafts cost more
- wrong: a proposer that is never right, with ``adaptive``, one request at a time
- wrong_fixed: the same without ``adaptive``
- draft_layers: the model's own first layers as the draft model, one request at a time
- async: asynchronous steps, 16 requests of ordinary text

The arms of a pair take turns in one process, and the first goes first every other time. The ratio of a pair is the
median over repeats of the first arm's time divided by the second's. ``outside_forward`` is the share of the wall time
in which no forward pass runs: Python's cost, as far as it is not hidden behind one. Results:
benchmarks/results/speculation.json, in which pairs that are not measured keep theirs. 5 repeats take about 10 minutes
on two cores.

    python benchmarks/bench_speculation.py [--repeats N] [--pairs copy,async]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from _common import RESULTS, save, summarise

import workbench
from workbench import Engine, EngineConfig, SamplingParams
from workbench.base.threads import num_threads

CODE = """def area(width, height):
    return width * height

def perimeter(width, height):
    return 2 * (width + height)

def describe(width, height):
    print("area", area(width, height))
    print("perimeter", perimeter(width, height))
"""
QUOTE = (
    "The committee met on Tuesday to discuss the new bridge. The chair said that the bridge would cost more than "
    "planned, and that the river had to be dredged first. The treasurer asked for a second estimate."
)
TEXTS = (
    f"{CODE}\n# The same file again, with one more function at the end:\n{CODE[:60]}",
    f"Report: {QUOTE}\n\nQuoted in full: {QUOTE[:60]}",
)
ORDINARY = "The history of the steam engine begins"


def ngram(num_drafts: int) -> dict[str, Any]:
    """Arguments of an engine that looks up to ``num_drafts`` drafts up in the text so far."""
    return {
        "num_speculative_tokens": num_drafts,
        "speculative": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    }


WRONG = {
    "num_speculative_tokens": 5,
    "speculative": {"method": "custom"},
    "proposer": lambda tokens, count: [0] * count,
}
ADAPTIVE = {**WRONG, "speculative": {"method": "custom", "adaptive": True}}
LAYERS = {"num_speculative_tokens": 3, "speculative": {"method": "draft_model", "num_layers": 10}}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "copy": (ngram(5), TEXTS, 64),
    **{f"copy_{num_drafts}": (ngram(num_drafts), TEXTS, 64) for num_drafts in (2, 3, 4, 8)},
    "copy_16": (ngram(5), TEXTS * 8, 32),
    "wrong": (ADAPTIVE, (ORDINARY,), 96),
    "wrong_fixed": (WRONG, (ORDINARY,), 96),
    "draft_layers": (LAYERS, TEXTS[:1], 48),
    "async": ({"async_scheduling": True}, (ORDINARY,) * 16, 48),
}
"""For each pair the arguments of its second engine, the prompts, and the output tokens of each request."""


def make_engine(model: Any, arguments: dict[str, Any]) -> Engine:
    fields = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 512, **arguments}
    options = {"proposer": fields.pop("proposer")} if "proposer" in fields else {}
    engine = Engine(model, EngineConfig(**fields), **options)
    engine.add_request("Warm up.", SamplingParams(max_tokens=8))
    engine.run(progress=False)
    return engine


def measure(engine: Engine, prompts: tuple[str, ...], max_tokens: int, together: bool) -> dict[str, Any]:
    """Serve the prompts, all at once or one after another; tokens, wall and CPU seconds, and the drafts' fate."""
    first = engine.trace[-1].step + 1
    tokens = []
    wall, cpu = time.perf_counter(), time.process_time()
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        if not together:
            tokens += [output.token_ids for output in engine.run(progress=False)]
    tokens += [output.token_ids for output in engine.run(progress=False)]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    records = [record for record in engine.trace if record.step >= first]
    chunks = [chunk for record in records for chunk in record.chunks]
    seconds = {
        name: sum(record.timings.get(name, 0.0) for record in records)
        for name in ("schedule", "wait", "prepare", "forward", "sample", "draft", "update")
    }
    return {
        "tokens": tokens,
        "wall_s": wall,
        "cpu_s": cpu,
        "steps": len(records),
        "drafts": sum(len(chunk.drafts) for chunk in chunks),
        "accepted": sum(chunk.num_accepted for chunk in chunks),
        "seconds": seconds,
    }


def run_pair(model: Any, name: str, repeats: int) -> dict[str, Any]:
    arguments, prompts, max_tokens = PAIRS[name]
    together = len(prompts) > 4
    engines = {"plain": make_engine(model, {}), name: make_engine(model, arguments)}
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in engines}
    for repeat in range(repeats):
        for arm in list(engines)[:: 1 if repeat % 2 else -1]:
            runs[arm].append(measure(engines[arm], prompts, max_tokens, together))
    for engine in engines.values():
        engine.close()
    plain, other = runs["plain"], runs[name]
    if any(run["tokens"] != plain[0]["tokens"] for run in (*plain, *other)):
        raise RuntimeError(f"pair {name!r}: the arms computed different tokens")
    ratios = {
        key: statistics.median(a[key] / b[key] for a, b in zip(plain, other, strict=True))
        for key in ("wall_s", "cpu_s")
    }
    num_tokens = sum(map(len, plain[0]["tokens"]))
    result = {
        "prompts": len(prompts),
        "num_speculative_tokens": arguments.get("num_speculative_tokens", 0),
        "output_tokens": num_tokens,
        "times_as_fast_wall": ratios["wall_s"],
        "times_as_fast_cpu": ratios["cpu_s"],
        "accepted_per_draft": other[0]["accepted"] / max(1, other[0]["drafts"]),
        "tokens_per_step": {
            arm: num_tokens / (len(prompts) if together else 1) / run[0]["steps"] for arm, run in runs.items()
        },
        "outside_forward": {
            arm: statistics.median(1 - one["seconds"]["forward"] / one["wall_s"] for one in run)
            for arm, run in runs.items()
        },
        "arms": {
            arm: {
                "wall_s": summarise([one["wall_s"] for one in run]),
                "cpu_s": summarise([one["cpu_s"] for one in run]),
                "output_tokens_per_s": summarise([num_tokens / one["wall_s"] for one in run]),
                "seconds_of_a_run": run[-1]["seconds"],
            }
            for arm, run in runs.items()
        },
    }
    print(
        f"{name}: {ratios['wall_s']:.2f} times as fast by wall time, {ratios['cpu_s']:.2f} by CPU time, "
        f"{result['accepted_per_draft']:.0%} of drafts accepted; outside of a forward pass "
        f"{result['outside_forward']['plain']:.1%} and {result['outside_forward'][name]:.1%} of the time",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", default=",".join(PAIRS), help="comma-separated; the default is all of them")
    options = parser.parse_args()
    chosen = options.pairs.split(",")
    if unknown := set(chosen) - set(PAIRS):
        parser.error(f"unknown pairs {sorted(unknown)}; the pairs are {', '.join(PAIRS)}")
    model = workbench.models.load_model("smollm2")
    path = RESULTS / "speculation.json"
    pairs = json.loads(path.read_text())["pairs"] if path.exists() else {}
    for name in chosen:
        pairs[name] = run_pair(model, name, options.repeats)
        save("speculation", {"model": "SmolLM2 135M, packed weights", "threads": num_threads(), "pairs": pairs})


if __name__ == "__main__":
    main()

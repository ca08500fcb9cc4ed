"""The price of adapters: decode steps of 16 requests with 4 adapters of rank 8 on every layer, over steps without.

Two engines run the bundled model, packed and compiled, and take the same steps in turns; the adapters are random. The
time is that of the processor, of a step of decodes alone.

    python benchmarks/bench_adapters.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _common import save, summarise

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models.load import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from random_adapters import linear_sizes, make_adapter

ADAPTERS, RANK = 4, 8


def make_engine(folder: Path | None, requests: int, context: int, steps: int) -> Engine:
    """An engine whose requests are decoding; with the adapters of a folder if there is one."""
    model = load_model("smollm2")
    names = [""]
    blocks = requests * (-(-(context + steps) // 16) + 2) + 1
    engine = Engine(model, EngineConfig(num_blocks=blocks, max_num_seqs=requests, enable_prefix_caching=False))
    if folder is not None:
        names = [f"adapter {number}" for number in range(ADAPTERS)]
        for seed, name in enumerate(names):
            engine.add_adapter(name, make_adapter(folder / name, linear_sizes(model.model), seed=seed, rank=RANK))
    sampling = SamplingParams(max_tokens=steps + 16, ignore_eos=True)
    for number in range(requests):
        prompt = [5 + (number * 37 + place * 11) % 900 for place in range(context)]
        engine.add_request(prompt, sampling, adapter=names[number % len(names)])
    while engine.step() is not None and any(chunk.arm != "decode" for chunk in engine.trace[-1].chunks):
        pass
    return engine


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps")
    options = parser.parse_args()
    sizes = options.requests, options.context, options.steps
    with (
        tempfile.TemporaryDirectory() as folder,
        make_engine(None, *sizes) as plain,
        make_engine(Path(folder), *sizes) as adapted,
    ):
        paths = {engine.runner.path.name for engine in (plain, adapted)}
        times: dict[str, list[float]] = {"plain": [], "adapted": []}
        for _ in range(options.steps):
            for name, engine in (("plain", plain), ("adapted", adapted)):
                start = time.process_time()
                engine.step()
                times[name].append(time.process_time() - start)
        chunks = plain.trace[-1].chunks
    assert len(chunks) == options.requests and all(chunk.arm == "decode" for chunk in chunks)
    ratios = [adapted / plain for plain, adapted in zip(times["plain"], times["adapted"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{options.requests} requests, {ADAPTERS} adapters of rank {RANK}: a decode step takes {ratio:.3f} of the time"
    )
    save(
        "adapters",
        {
            "model": "smollm2",
            "requests": options.requests,
            "adapters": ADAPTERS,
            "rank": RANK,
            "context": options.context,
            "paths": sorted(paths),
            "cpu_seconds": {name: summarise(seconds) for name, seconds in times.items()},
            "ratio": summarise(ratios),
        },
    )


if __name__ == "__main__":
    main()

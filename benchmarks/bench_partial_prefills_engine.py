"""SmolLM2 on this machine: short prompts that arrive during the prefill of two long ones, with and without limits.

Two prompts of 3,000 tokens at step 0 and twelve of 20 to 40 tokens, one every second step after that. Arrivals are
tied to steps, so every run has the same schedule. Times are wall-clock times from the trace. The texts must be equal.

    python benchmarks/bench_partial_prefills_engine.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

from workbench import Engine, EngineConfig, SamplingParams

NUM_LONG, LONG_TOKENS, NUM_SHORT, OUTPUT_TOKENS = 2, 3000, 12, 16
SHORT_EVERY = 2
"""Steps between two arrivals of short prompts."""

CONFIG = EngineConfig(max_num_batched_tokens=256, max_num_seqs=16, num_blocks=512, enable_prefix_caching=False)
SETTINGS = {
    "off": CONFIG,
    "off, threshold 128 (vLLM's chunk cap)": CONFIG.replace(long_prefill_token_threshold=128),
    "num=4 long=1": CONFIG.replace(
        max_num_partial_prefills=4, max_long_partial_prefills=1, long_prefill_token_threshold=128
    ),
}


def prompts(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """Long and short prompts, from text in Python's standard library."""
    from pydoc_data.topics import topics

    token_ids = engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    long = [token_ids[i * LONG_TOKENS : (i + 1) * LONG_TOKENS] for i in range(NUM_LONG)]
    begin = NUM_LONG * LONG_TOKENS
    short = [token_ids[begin + 100 * i : begin + 100 * i + 20 + (7 * i) % 21] for i in range(NUM_SHORT)]
    return long, short


def run(config: EngineConfig) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Run one setting: tokens by request, and times to first token in seconds and in steps."""
    engine = Engine("smollm2", config)
    long, short = prompts(engine)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    engine.add_request([100, 200, 300], params, request_id="warm")
    engine.run(progress=False)
    begin = len(engine.trace)
    for index, prompt in enumerate(long):
        engine.add_request(prompt, params, request_id=f"long{index}")
    waiting = list(enumerate(short))
    while True:
        if waiting and len(engine.trace) - begin >= 1 + SHORT_EVERY * waiting[0][0]:
            index, prompt = waiting.pop(0)
            engine.add_request(prompt, params, request_id=f"short{index}")
        if engine.step() is None and not waiting:
            break
    requests = {rid: request for rid, request in engine.trace.metrics().requests.items() if rid != "warm"}
    tokens = {rid: list(engine.output(rid).token_ids) for rid in requests}
    times: dict[str, float] = {"steps": len(engine.trace) - begin}
    for kind in ("short", "long"):
        chosen = [request for rid, request in requests.items() if rid.startswith(kind)]
        times[f"{kind}_mean_ttft_s"] = statistics.mean(request.ttft.seconds for request in chosen)
        times[f"{kind}_max_ttft_s"] = max(request.ttft.seconds for request in chosen)
        times[f"{kind}_mean_ttft_steps"] = statistics.mean(request.ttft.steps for request in chosen)
    times["duration_s"] = engine.trace[-1].end - engine.trace[begin].time
    engine.close()
    return tokens, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    texts: dict[str, dict[str, list[int]]] = {}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(repeats):  # settings are interleaved, so that other load affects all of them alike
        for name, config in SETTINGS.items():
            texts[name], measured = run(config)
            times[name].append(measured)
    results: dict[str, Any] = {}
    for name, rows in times.items():
        ratio = [off["short_mean_ttft_s"] / row["short_mean_ttft_s"] for off, row in zip(times["off"], rows)]
        results[name] = {key: summarise([row[key] for row in rows]) for key in rows[0]}
        results[name]["times_faster_than_off_for_short"] = summarise(ratio)
        results[name]["tokens_equal_off"] = texts[name] == texts["off"]
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"{name:40} short TTFT {median['short_mean_ttft_s']:.2f} s ({statistics.median(ratio):.1f} times better), "
            f"long {median['long_mean_ttft_s']:.2f} s, all {median['duration_s']:.2f} s in {median['steps']:.0f} steps,"
            f" tokens {'equal' if texts[name] == texts['off'] else 'DIFFER'}"
        )
    save("partial_prefills_engine", {"config": CONFIG.to_dict(), "settings": results})


if __name__ == "__main__":
    main()

"""The trade-off of the token budget: small chunks keep tokens flowing, large ones read the weights less often.

The same requests under budgets of 32, 128 and 512 tokens a step. A decode that shares its step with a prompt chunk
waits for the whole chunk, so both the inter-token latency and the throughput grow with the budget. Each run is a
separate process, the budgets are interleaved, and medians are saved after every repeat to
benchmarks/results/chunk_size[_small].json.

    python benchmarks/bench_chunk_size.py --small        # 12 requests of 256 in, 32 out: about 8 minutes on two cores
    python benchmarks/bench_chunk_size.py                # 100 requests of 1,024 in, 128 out
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from _common import save, summarise
from bench_serving import bundled_tokenizer, run_engine
from serving.metrics import serving_metrics
from serving.workloads import FULL, Shape, Workload, make_workload

BUDGETS = (32, 128, 512)
SMALL = Shape("12 requests of 256 in, 32 out", 12, 256, 32, 4, 10.0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="for two cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    options = parser.parse_args()
    _, vocabulary, model = bundled_tokenizer()
    shape = SMALL if options.small else FULL["random"]
    workload = make_workload("chunk_size", shape, vocabulary)
    runs: dict[int, list[dict[str, float]]] = {}
    tokens = None
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for budget in options.budgets:
                bounded = Workload(workload.name, replace(shape, token_budget=budget), workload.requests)
                file = Path(folder) / f"{budget}.json"
                file.write_text(json.dumps(bounded.to_dict()))
                result, timelines = run_engine("workbench", str(file), sys.executable, model)
                outputs = [timeline.tokens for timeline in timelines]
                if outputs != (tokens := tokens or outputs):
                    raise RuntimeError(f"budget {budget} changed an output")
                result |= serving_metrics(bounded, timelines)
                runs.setdefault(budget, []).append(result)
                print(
                    f"{repeat} budget {budget:4d}  {result['output_tokens_per_s']:6.2f} output tok/s  cpu "
                    f"{result['cpu_s']:6.2f} s  itl {result['median_itl_s']:.3f} s, p99 {result['p99_itl_s']:.3f} s",
                    flush=True,
                )
            save(
                f"chunk_size{'_small' if options.small else ''}",
                {
                    "workload": asdict(shape) | {"token_budget": "see budgets"},
                    "outputs": "the same tokens under every budget",
                    "budgets": {
                        str(budget): {row: summarise([run[row] for run in results]) for row in results[0]}
                        for budget, results in runs.items()
                    },
                },
            )


if __name__ == "__main__":
    main()

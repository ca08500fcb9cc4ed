"""A cost model fitted to synthetic steps, and a bootstrap of it: CPU time of this checkout and of another.

Each repeat runs both checkouts, each in a process, so that drift of a shared machine meets both alike.

    git worktree add /tmp/base 9ba21ee
    python benchmarks/bench_fit.py /tmp/base [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _common import before_arm, save, summarise

HERE = Path(__file__).parents[1]
SIZES = (397, 2_000, 20_000)
PROGRAM = """
import importlib, json, random, time
home = importlib.import_module("workbench.HOME.cost_model")
model = home.CostModel(
    fixed=0.004, per_sequence=2e-5, per_kv_token=4e-8, per_attention_cell=2e-9, per_prefill_step=1e-3,
    weights=0.008, per_row=6e-5, overlap=3.0,
)
rng = random.Random(0)
found = {}
for count in SIZES:
    features, sequences, kv_tokens = [], 8, 4000
    for _ in range(count):
        sequences = max(1, min(64, sequences + rng.choice([-1, 0, 0, 1])))
        kv_tokens = max(sequences, int(0.98 * kv_tokens) + sequences * rng.randint(1, 12))
        prompt = rng.randint(1, 500) if rng.random() < 0.25 else 0
        cells = prompt * rng.choice([0, 1000]) + prompt * (prompt + 1) // 2
        features.append((sequences, prompt, kv_tokens + prompt, cells))
    seconds = [model.seconds(row) * rng.lognormvariate(0, 0.08) for row in features]
    places = [(0, step) for step in range(count)]
    if HOME == "simulation":
        import numpy as np

        features, seconds, places = np.array(features, float), np.array(seconds), np.array(places)
    steps = home.StepCosts(features, seconds, places, *[[0.0] * count][: len(home.StepCosts.__annotations__) > 3])
    fit = getattr(home, "fit", None) or (lambda steps, _: home.CostModel.of_fit(home.Fit(steps, 1)))
    runs = {"fit": lambda: fit(steps, 1), "bootstrap": lambda: home.CostModel.bootstrap(steps, 8)}
    for name, run in runs.items():
        before = time.process_time()
        run()
        found[f"{name}, {count} steps"] = time.process_time() - before
print(json.dumps(found))
"""


def measure(checkout: Path) -> dict[str, float]:
    """CPU seconds of each fit and bootstrap in a process of a checkout."""
    parts = checkout / "workbench" / "simulation" / "costs"
    home = "simulation.costs" if parts.is_dir() else "costs"
    program = PROGRAM.replace("workbench.HOME", f"workbench.{home}").replace("HOME", repr(home))
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program.replace("SIZES", repr(SIZES))]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement (default 5)")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    times: dict[str, dict[str, list[float]]] = {}
    for repeat in range(options.repeats):
        for arm in sorted(checkouts, reverse=repeat % 2 == 1):
            before_arm(arm)
            for what, value in measure(checkouts[arm]).items():
                times.setdefault(what, {"this": [], "other": []})[arm].append(value)
    results = {}
    for what, arms in times.items():
        this, other = (statistics.median(arms[arm]) for arm in checkouts)
        results[what] = {arm: summarise(values) for arm, values in arms.items()} | {"ratio": round(this / other, 3)}
        print(f"{what:24} {this:8.3f} {other:8.3f}  ratio {this / other:.2f}")
    save("fit", {"what": "CPU seconds of this checkout and of another, interleaved", "measurements": results})


if __name__ == "__main__":
    main()

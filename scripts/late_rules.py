"""Make models with a made-up rule that begins at a random position or length, and print which of them are noticed.

    python scripts/late_rules.py [--models 200] [--seed 0]

The rules are those of ``tests/support/late_rules.py``. A model is noticed if it is refused when it is loaded, or served
in a way whose logits are those of plain mlx-lm beyond the place where its rule begins. 200 models take about ten
minutes of processor time.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

import workbench  # before MLX, for its BLAS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import numpy as np
from late_rules import draw, judge, make

KINDS = {"position": "a position", "growing": "a position, and grows", "keys": "a number of keys"}
KINDS |= {"offset": "the cache's offset, as a number", "input": "a number of tokens given at once"}


def main() -> None:
    """Print a table by what rules depend on, and the rules that were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    generator, found, missed = np.random.default_rng(options.seed), Counter[tuple[str, str]](), []
    for number in range(options.models):
        mutant = draw(generator)
        verdict, way = judge(make(mutant, number, f"late_rule_{options.seed}_{number}"))
        found[mutant.begins, verdict] += 1
        if verdict == "wrong":
            missed.append(f"{mutant}: {way}")
    print("| a rule that begins at | models | refused | served with the rule | missed |")
    print("|---|---|---|---|---|")
    for begins, words in KINDS.items():
        counts = [found[begins, verdict] for verdict in ("refused", "right", "wrong")]
        print(f"| {words} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    num_noticed = options.models - len(missed)
    print(f"\n{workbench.__version__}, seed {options.seed}: {num_noticed} of {options.models} noticed, missed:")
    print("\n".join(missed) or "none")


if __name__ == "__main__":
    main()

"""Does the time of a key's check tell how much of the key is right, or which key it is?

    python tests/soak/key_timing.py

Times the check for pairs of given keys in random order, and compares the two halves with Welch's t, as dudect does
(Reparaz, Balasch, Verbauwhede: "Dude, is my code constant time?", 2017), which calls |t| > 4.5 a leak. The control is a
comparison that ends at the first wrong character. Prints one line of JSON.
"""

import json
import random
import statistics
import time

from workbench.apps.serve.keys import ApiKey, KeyRing

NUM_PAIRS = 100_000
NUM_KEYS = 8


class LeakyRing:
    """The control: compares character by character, and ends at the first wrong one."""

    def __init__(self, keys):
        self._keys = keys

    def find(self, given):
        for key in self._keys:
            for a, b in zip(given, key):
                if a != b:
                    break
            else:
                return key
        return None


def welch_t(a, b):
    """Welch's t of two samples, without the slowest tenth of both, which are interruptions."""
    cut = statistics.quantiles(a + b, n=10)[-1]
    a, b = ([value for value in sample if value <= cut] for sample in (a, b))
    spread = statistics.variance(a) / len(a) + statistics.variance(b) / len(b)
    return (statistics.fmean(a) - statistics.fmean(b)) / spread**0.5


def measure(find, one, other, draw):
    times = {one: [], other: []}
    for _ in range(NUM_PAIRS):
        for given in draw.sample((one, other), 2):
            start = time.perf_counter_ns()
            find(given)
            times[given].append(time.perf_counter_ns() - start)
    return round(welch_t(times[one], times[other]), 2)


def main():
    draw = random.Random(5)
    keys = ["".join(draw.choices("0123456789abcdef", k=32)) for _ in range(NUM_KEYS)]
    nothing_right = "".join("g" for _ in keys[0])
    almost = keys[0][:-1] + "g"
    pairs = {
        "nothing right, all but the last character right": (nothing_right, almost),
        "nothing right, half right": (nothing_right, keys[0][:16] + "g" * 16),
        "the first key, the last key": (keys[0], keys[-1]),
        "two wrong keys": (nothing_right, "h" * 32),
    }
    ring, leaky = KeyRing([ApiKey.of(key, f"k{i}") for i, key in enumerate(keys)]), LeakyRing(keys)
    report = {
        name: {"t": measure(ring.find, *pair, draw), "t of the control": measure(leaky.find, *pair, draw)}
        for name, pair in pairs.items()
    }
    print(json.dumps({"pairs": NUM_PAIRS, **report}))


if __name__ == "__main__":
    main()

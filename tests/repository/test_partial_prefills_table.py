"""The table of limits on partial prefills in docs/scheduling.md has the numbers of its measurement."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "benchmarks" / "results" / "partial_prefills.json").read_text())["cases"]
ROWS = (
    ("mix", "num=4 long=1"),
    ("mix", "num=8 long=2"),
    ("groups_output_128", "num=4 long=1"),
    ("groups_output_1", "num=4 long=1"),
    ("seats_128", "num=4 long=1"),
    ("seats_1024", "num=4 long=1"),
    ("uniform", "num=4 long=1"),
    ("uniform_none_long", "num=4 long=4"),
    ("uniform_none_long", "num=16 long=16"),
)
"""Case and limits of the rows, in order."""


def shown(ratio):
    return f"{ratio:.2f}"


def test_every_ratio_is_the_measured_one():
    page = (ROOT / "docs" / "scheduling.md").read_text()
    table = page.split("### Measured limits")[1].split("|---|\n")[1].split("\n\n")[0].split("\n")
    assert len(table) == len(ROWS)
    for line, (case, limits) in zip(table, ROWS):
        _, said, mean, median, p99, short, long = (cell.strip() for cell in line.split("|")[1:-1])
        result = CASES[case][limits]
        ratios, worst = result["ratio_to_off"], result["worst_ratio_to_off"]
        assert limits in said, line
        assert (mean, median) == (shown(ratios["mean_ttft"]), shown(ratios["median_ttft"])), line
        assert p99 == f"{shown(ratios['p99_ttft'])} ({shown(worst['p99_ttft'])})", line
        names = [name for name in ratios if re.fullmatch(r"(short|small)_mean_ttft", name)]
        assert [short] == [shown(ratios[name]) for name in names] or not (short or names), line
        found = sorted(shown(ratios[name]) for name in ratios if re.fullmatch(r"(long|large).*_mean_ttft", name))
        if found:
            assert long == (found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"), line


def test_other_limits_that_are_said_to_be_equal_are():
    for case in ("groups_output_128", "groups_output_1", "uniform"):
        four, sixteen = (CASES[case][f"num={num} long=1"]["ratio_to_off"] for num in (4, 16))
        assert {name: shown(ratio) for name, ratio in four.items()} == {name: shown(r) for name, r in sixteen.items()}
    for name, case in CASES.items():
        if name != "starving" and not name.startswith("seats"):
            assert set(case["num=1 long=1"]["ratio_to_off"].values()) == {1.0}, name
    starving = {name: case["first_token_step"] for name, case in CASES["starving"].items()}
    assert starving["off"] == starving["num=1 long=1"]
    assert (starving["off"]["short"], starving["num=2 long=1"]["short"]) == (195, 0)
    for limits in ("off", "num=2 long=1"):
        assert [starving[limits][f"L{i}"] for i in range(4)] == [48, 97, 146, 195]

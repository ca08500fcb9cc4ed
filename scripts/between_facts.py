"""Collect what `hunt --between` found into docs/releases.md and benchmarks/results/between.json.

    python scripts/between_facts.py found/0.31.0-0.32.0 found/0.32.0-0.33.0

Each folder is the ``--out`` of a comparison of two releases, the older one first. The other pairs stay as they are, and
so does the part of the page that was written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "between.json"
PAGE = ROOT / "docs" / "releases.md"
MOST_NAMES = 8
"""Places and lines of a difference on the page."""

BY_HAND = "<!-- Written by hand from here on. -->\n"
HEAD = """# vLLM's releases in behaviour

Differences of vLLM's scheduler between releases, found by `workbench hunt --between` ([how](hunt.md#two-schedulers)) on
random workloads, with the numbers of the lines of the newer release that decide. "By trial" says that the newer
scheduler decides as the older one does with the older text of these lines; otherwise they are the first ones that ran
on one side only. A difference that is frequent in these workloads need not be so in yours: they use every feature, in
tiny pools. `python scripts/between_facts.py FOLDER ...` writes the tables; the smallest workload of each difference is
in `benchmarks/results/between.json`, for `workbench simulate` too. Two cores were busy with other work, at loads of 7
to 13. [The sources of 0.32 and 0.33](#032-to-033-read-in-the-sources) were also read by hand.
"""


def facts(folder: Path) -> dict[str, Any]:
    """The facts of a comparison, without text of the sources."""
    told = json.loads((folder / "between.json").read_text())
    found = []
    for name in told["findings"]:
        one = json.loads((folder / name / "finding.json").read_text())
        kept = {key: one[key] for key in ("kind", "message", "place", "by_trial", "needs", "num_seen", "num_requests")}
        lines = one["lines_b"] or one["lines_a"]
        kept["lines"] = ranges([(line["file"].rpartition("/")[2], line["number"]) for line in lines])
        found.append(kept | {"workload": json.loads((folder / name / "workload.json").read_text())})
    surface = {key: len(value) for key, value in told["surface"].items()}
    told["settings_of_one_side"] = {Path(name).name: each for name, each in told["settings_of_one_side"].items()}
    keys = ("workloads", "different", "seconds", "settings_of_one_side")
    versions = {side: told[side]["version"] for side in ("a", "b")}
    return {**versions, **{key: told[key] for key in keys}, "surface": surface, "found": found}


def ranges(lines: list[tuple[str, int]]) -> list[str]:
    """Files with ranges of lines, a few lines of layout between them left out."""
    made: list[list[Any]] = []
    for file, number in sorted(set(lines)):
        if made and made[-1][0] == file and number - made[-1][2] <= 8:
            made[-1][2] = number
        else:
            made.append([file, number, number])
    return [f"{file}:{first}" + (f"-{last}" if last > first else "") for file, first, last in made]


def first(names: list[str]) -> str:
    """The first names of a list; a trial that ran out of time leaves many."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def section(pair: dict[str, Any]) -> str:
    """The section of a pair of releases."""
    share = pair["different"] / pair["workloads"]
    static = pair["surface"]
    lines = [f"## {pair['a']} to {pair['b']}", ""]
    lines.append(
        f"{pair['workloads']:,} workloads in {pair['seconds']:.0f} s, {pair['different']:,} differ ({share:.1%}). "
        f"Without a run: {static['changed']} signatures, fields and bases changed, {static['added']} names are new, "
        f"{static['removed']} gone, {static['moved']} moved."
    )
    lines += ["", "| kind | needs | 1 in | decided in | lines | by trial |", "|---|---|---|---|---|---|"]
    for one in pair["found"]:
        place = first(one["place"].replace("vllm/v1/core/", "").replace("vllm/", "").split(", "))
        needs = ", ".join(one["needs"]) or "nothing"
        often = round(pair["workloads"] / one["num_seen"])
        trial = "yes" if one["by_trial"] else "no"
        lines.append(f"| {one['kind']} | {needs} | {often:,} | {place} | {first(one['lines'])} | {trial} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    known = json.loads(RESULT.read_text())["pairs"] if RESULT.exists() else []
    made = {(pair["a"], pair["b"]): pair for pair in (*known, *(facts(Path(folder)) for folder in sys.argv[1:]))}
    pairs = sorted(made.values(), key=lambda pair: [int(part) for part in pair["b"].split(".")])
    by_hand = PAGE.read_text(encoding="utf-8").partition(BY_HAND)[2]
    RESULT.write_text(json.dumps({"benchmark": "between", "pairs": pairs}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text("\n".join([HEAD, *map(section, pairs), BY_HAND + by_hand]), encoding="utf-8")


if __name__ == "__main__":
    main()

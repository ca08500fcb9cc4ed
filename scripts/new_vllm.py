"""Everything about a new release of vLLM: is its scheduler still ours, and if not, what is to be changed?

    make new-vllm VERSION=0.34.0
    python scripts/new_vllm.py 0.34.0 --last 0.33.0 --python .venv-vllm/bin/python --seconds 120 --out found/new-vllm

VERSION and --last are releases, or folders with vLLM's packages. In this order: a certificate of the release, feature
by feature, with Workbench's scheduler as the judge; ``hunt --between`` the last release and this one, whose deciding
lines tell what changed; the methods that the recorder overrides, in both sources; a hunt for broken laws. The results
go to ``benchmarks/results/new_vllm.json`` and into the table of docs/limits.md. The last lines are "equal", or "to be
changed:" with a list; the exit status is 0 or 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.analysis.certify import Certificate, certify
from workbench.analysis.hunt.between import compare_schedulers
from workbench.analysis.hunt.between.sides import Place, place_of

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "new_vllm.json"
PAGE = ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- releases: scripts/new_vllm.py -->", "<!-- end of releases -->"
RECORDER = "vllm:workbench.vllm:RecordingScheduler"


def certificate(place: Place, python: str, workloads: int, out: Path) -> Certificate:
    """The certificate of a release."""
    paths = os.pathsep.join(filter(None, (place.packages, str(ROOT), os.environ.get("PYTHONPATH", ""))))
    interpreter = place.python or python or sys.executable
    command = f"env VLLM_LOGGING_LEVEL=ERROR PYTHONPATH={paths} {interpreter} -m workbench certify --speak vllm"
    return certify(command, workloads=workloads, seed=0, out=out / "certificate")


def laws(place: Place, python: str, seconds: float, out: Path) -> list[str]:
    """The folders of what a hunt finds in a release."""
    paths = os.pathsep.join(filter(None, (place.packages, str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [place.python or python or sys.executable, "-m", "workbench", "hunt", "--scheduler", "vllm"]
    command += ["--for", f"{seconds:g}s", "--out", str(out / "laws")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"the hunt of {place.spec} did not end: its last words are above")
    return list(json.loads(done.stdout.splitlines()[-1])["findings"])


def examine(options: argparse.Namespace) -> dict[str, Any]:
    """Everything about the release."""
    out: Path = options.out
    began = time.monotonic()
    place = place_of(options.version)
    made = certificate(place, options.python, options.workloads, out)
    print(made, flush=True)
    comparison, names = compare_schedulers(
        options.last, options.version, seconds=options.seconds, python=options.python, out=out / "between"
    )
    hooks = _hooks(options)
    found = laws(place, options.python, options.seconds / 2, out) if options.seconds else []
    return {
        "version": comparison.b.version,
        "last": comparison.a.version,
        "features_equal": [row.feature for row in made.rows if row.certified],
        "features_that_differ": {
            row.feature: row.first.message if row.first else row.problem or row.unsupported[0]
            for row in made.rows
            if not row.certified
        },
        "workloads": comparison.num_workloads,
        "different": comparison.num_different,
        "differences": [
            {"kind": each.difference.kind, "place": each.decided.place, "folder": name}
            for each, name in zip(comparison.found, names)
        ],
        "hooks_that_changed": hooks,
        "laws": found,
        "seconds": round(time.monotonic() - began),
    }


def _hooks(options: argparse.Namespace) -> list[str]:
    """The methods that the recorder overrides, and that are not the same in both releases."""
    from workbench.analysis.hunt.between.sides import Asked
    from workbench.analysis.hunt.between.surface import compare

    os.environ["WORKBENCH_TRACE_DIR"] = str(options.out / "recorded")
    sides = []
    for spec in (options.last, options.version):
        place = place_of(spec)
        place.python, place.scheduler = place.python or options.python, RECORDER
        sides.append(Asked(place, as_vllm=True))
    folders = [side.package for side in sides]
    hooks = list(dict.fromkeys(name for side in sides for name in side.hooks))
    lost = [name for name in sides[0].hooks if name not in sides[1].hooks]
    for side in sides:
        side.close()
    assert folders[0] is not None and folders[1] is not None
    return sorted({*compare(folders[0], folders[1], hooks).hooks, *lost})


def to_change(result: dict[str, Any]) -> list[str]:
    """The changes that are needed, a line each."""
    lines = [f"{feature}: {message}" for feature, message in result["features_that_differ"].items()]
    if lines:
        lines += [f"look at {each['kind']}, decided in {each['place']}" for each in result["differences"]]
    return lines + [f"the recorder overrides {name}, which changed" for name in result["hooks_that_changed"]]


def write_table(results: dict[str, dict[str, Any]]) -> None:
    """Write the table of docs/limits.md."""
    rows = ["| vLLM | features equal | differs from | recorder |", "|---|---|---|---|"]
    for version in sorted(results, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        result = results[version]
        count = len(result["features_equal"])
        differs = ", ".join(result["features_that_differ"])
        equal = f"{count} of {count + len(result['features_that_differ'])}" + (f", not {differs}" if differs else "")
        places = f"{len(result['differences'])} places ({result['different']} of {result['workloads']:,} workloads)"
        hooks = ", ".join(f"`{name}` changed" for name in result["hooks_that_changed"]) or "its hooks are the same"
        last = "itself" if result["last"] == version else result["last"]
        rows.append(f"| {version} | {equal} | {last}: {places} | {hooks} |")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *rows, "", f"{END}{after}"]), encoding="utf-8")


def main() -> int:
    """Examine a release, and say what is to be changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--last", default="0.33.0", help="the release that Workbench's scheduler equals")
    parser.add_argument("--python", default="", help="the interpreter of vLLM's environment (default: this one)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time of the comparison; the hunt takes half of it"
    )
    parser.add_argument("--workloads", type=int, default=40, help="for each feature of the certificate")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = examine(options)
    results = json.loads(RESULT.read_text())["releases"] if RESULT.exists() else {}
    results[result["version"]] = result
    RESULT.write_text(json.dumps({"benchmark": "new_vllm", "releases": results}, indent=1) + "\n", encoding="utf-8")
    write_table(results)
    changes = to_change(result)
    print("to be changed:\n" + "\n".join(changes) if changes else "equal")
    return int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())

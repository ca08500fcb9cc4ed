"""Write the recorded runs of vLLM's scheduler as neutral files, one per feature: fidelity/runs.

    python scripts/make_fidelity_suite.py [--check]

The recordings are those of tests/data, made with vLLM 0.33.0. A line is a run, ``{"workload", "steps", "end"}``, as
docs/certify.md describes it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.analysis.certify.neutral import neutral_workload

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
SUITE = ROOT / "fidelity" / "runs"


def runs() -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]], str]]:
    """Each recorded run: its name, the workload of ``simulate()``, the recorded steps and the end."""
    for path in sorted((DATA / "vllm/workloads").glob("*.json")):
        _, *steps, last = map(json.loads, (DATA / "vllm/traces" / f"{path.stem}.jsonl").read_text().splitlines())
        yield path.stem, json.loads(path.read_text()), steps, last["end"]
    for path in sorted((DATA / "vllm-features").glob("*.json.gz")):
        run = json.loads(gzip.decompress(path.read_bytes()))
        yield path.name.removesuffix(".json.gz"), run["workload"], run["steps"], run["end"]["end"]
    for kind in ("adapters", "grammars"):
        for index, run in enumerate(json.loads(gzip.decompress((DATA / f"vllm-{kind}/runs.json.gz").read_bytes()))):
            yield f"{kind}_{index}", run["workload"], run["steps"], run["end"]


def feature(name: str, workload: dict[str, Any]) -> str:
    """The file of a run: its rarest feature."""
    config, kinds = workload["config"], {group["kind"] for group in workload["config"].get("kv_cache_groups", ())}
    if name.startswith(("adapters", "grammars")):
        return name.partition("_")[0]
    if "mamba" in kinds:
        return "recurrent"
    if kinds:
        return "windows"
    if config.get("num_speculative_tokens"):
        return "drafts-asynchronous" if config.get("async_scheduling") else "drafts"
    return "asynchronous" if config.get("async_scheduling") else "synchronous"


def neutral_step(step: dict[str, Any]) -> dict[str, Any]:
    """A recorded step."""
    scheduled, drafts = step["scheduled"], step.get("drafts", {})
    pairs = list(scheduled.items()) if isinstance(scheduled, dict) else scheduled
    starts = step["num_computed_before"]
    names = {*step["new"], *step["resumed"]}
    tables = step["block_ids"]
    return {
        "chunks": [
            {"id": name, "start": starts[name], "num_tokens": count, "num_drafts": len(drafts.get(name, ()))}
            for name, count in pairs
        ],
        "hits": {name: starts[name] for name, _ in pairs if name in names},
        "preempted": step["preempted"],
        "finished": step["finished"],
        "blocks": {
            name: tables[name] if tables[name] and isinstance(tables[name][0], list) else [tables[name]]
            for name, _ in pairs
        },
    }


def suite() -> dict[str, bytes]:
    """The content of each file."""
    lines: dict[str, list[str]] = {}
    for name, workload, steps, end in runs():
        run = {
            "workload": neutral_workload(name, workload),
            "steps": [neutral_step(step) for step in steps],
            "end": end,
        }
        lines.setdefault(f"{feature(name, workload)}.jsonl.gz", []).append(json.dumps(run))
    return {
        name: gzip.compress("".join(f"{line}\n" for line in each).encode(), mtime=0) for name, each in lines.items()
    }


def main() -> int:
    """Write the files, or tell which are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is not current")
    options = parser.parse_args()
    SUITE.mkdir(parents=True, exist_ok=True)
    made = suite()
    old = [path.name for path in SUITE.glob("*.gz") if path.name not in made]
    for name, content in made.items():
        path = SUITE / name
        if not path.exists() or gzip.decompress(path.read_bytes()) != gzip.decompress(content):
            old.append(name)
            if not options.check:
                path.write_bytes(content)
    if options.check and old:
        print(f"not current: {', '.join(sorted(old))}: run scripts/make_fidelity_suite.py", file=sys.stderr)
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())

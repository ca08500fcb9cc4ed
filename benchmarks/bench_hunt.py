"""Known faults of released schedulers: does the hunt find them, how fast, and how small is the case?

    make measure-hunt
    make measure-hunt ARGS="--seeds 5 --only nano"

Each entry is a fault with its version and thread. A hunt of one process checks the entry's law alone, and ends at the
first case that fits, or after ``--for`` CPU seconds. Then the generated test runs in an environment without
Workbench: it must fail on the faulty version, and pass on one without the fault: another release, or a copy with the
patch in ``benchmarks/hunt``. CPU seconds are those of the process from the first workload to the end of shrinking.
NANO_VLLM names a clone of nano-vllm, MINI_SGLANG a checkout of mini-sglang; without one, its entries are skipped.
The result is saved after each entry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, save

PATCHES = Path(__file__).parent / "hunt"
NANO = "workbench.analysis.hunt.nano_vllm:NanoScheduler"
MINI = "workbench.analysis.hunt.mini_sglang:MiniScheduler"
CHECKOUTS = {NANO: "NANO_VLLM", MINI: "MINI_SGLANG"}


@dataclass(frozen=True)
class Entry:
    """A fault that is known.

    Attributes:
        name: A few words.
        version: The faulty release of vLLM, or the faulty commit of nano-vllm.
        law: The law that it breaks.
        place: A regular expression that occurs in the place of the finding.
        mended: A release or a commit without the fault, or a patch.
        thread: The thread that reported it; "" if there is none.
        needs: A feature of the smallest case that tells it from others at its place.
        scheduler: As on the command line.
    """

    name: str
    version: str
    law: str
    place: str
    mended: str
    thread: str = ""
    needs: str = ""
    scheduler: str = "vllm"


ENTRIES = (
    Entry("drafts behind a cap end the engine", "0.33.0", "crash", r"assert num_new_tokens == 1", "padding.patch"),
    Entry("recurrent layers wait", "0.33.0", "progress", r"recurrent.*batched_tokens is too small", "recurrent.patch"),
    Entry("a budget below 1 + drafts", "0.33.0", "progress", r"requests wait.*below 1 \+ drafts", "0.29.0"),
    Entry("a prompt larger than the pool", "0.33.0", "progress", r"no schedule can serve", "pool.patch", "#35541"),
    Entry("a seat for a lower priority", "0.33.0", "order", r"lower|priority|served", "seats.patch", "#40004"),
    Entry(
        "a preempted request overtaken", "0.33.0", "order", r"preempted_behind_newcomers", "overtaken.patch", "#41951"
    ),
    Entry("finished rows keep seats", "0.33.0", "utilisation", r"finished_rows", "rows.patch", "#45257"),
    Entry("hashes of a chunk taken back", "0.33.0", "content", r"", "hashes.patch"),
    Entry("a victim before the cursor", "0.25.1", "order|progress", r"skipped|turn", "0.33.0", "#49097"),
    Entry("a window admitted as a whole", "0.19.1", "progress", r"num_blocks", "0.33.0", "#39734", needs="windows"),
    Entry(
        "more requests than seats",
        "bb823b3",
        "limits",
        r"too many requests run",
        "nano-seats.patch",
        "PR 271",
        "",
        NANO,
    ),
    Entry("assertions of the decode", "44a51af", "crash", r"last_block.hash", "f64d821", "", "", NANO),
    Entry("a dangling hash", "7f967ed", "content", r"", "nano-hash.patch", "#163", "", NANO),
    Entry("pages counted as tokens", "20fcd7f", "crash", r"[Ee]vict", "mini-pages.patch", "", "", MINI),
)


def hunt_entry(entry: Entry, seeds: int, seconds: float, out: Path) -> None:
    """In the faulty environment: hunt with each seed until the entry is found, and print what was found as JSON."""
    from workbench.analysis.hunt import described
    from workbench.analysis.hunt.search import Found, Search, shape
    from workbench.analysis.hunt.target import find_target

    def tell(search: Search, found: Found | None) -> None:
        if (found is not None and fits(found)) or time.process_time() - began > seconds:
            raise KeyboardInterrupt

    def fits(found: Found) -> bool:
        wanted = re.search(entry.place, found.fault.place)
        return bool(wanted) and (not entry.needs or entry.needs in shape(found.workload))

    target = find_target(entry.scheduler)
    for seed in range(seeds):
        began = time.process_time()
        search = Search(target, None, None, seed, entry.law.split("|"), None, tell)
        with contextlib.suppress(KeyboardInterrupt):
            search.run()
        spent = time.process_time() - began
        result: dict[str, Any] = {"workloads": search.num_workloads, "cpu_seconds": round(spent, 2), "found": False}
        for found in search.found:
            if fits(found):
                finding = described(search, found, out / str(seed))
                result |= {"found": True, "workloads": found.num_workloads}
                result |= {"requests": finding.num_requests, "message": finding.message, "place": finding.place}
                result |= {"folder": f"{seed}/{finding.folder}", "law": finding.law}
        print(json.dumps(result), flush=True)
        print(f"{entry.name}, seed {seed}: {json.dumps(result)}", file=sys.stderr, flush=True)
        if not search.found and seed == 1:  # the others will not find it either
            break


def environment(packages: Path, entry: Entry, *, has_workbench: bool) -> dict[str, str]:
    """The environment of a version, with Workbench or without."""
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    paths = [folder for folder in given if not (Path(folder) / "workbench").is_dir()]
    paths += [str(Path(__file__).resolve().parents[1])] * has_workbench
    if name := CHECKOUTS.get(entry.scheduler):
        return {**os.environ, name: str(packages), "PYTHONPATH": os.pathsep.join(paths)}
    paths.insert(0, str(packages))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"}


def packages_of(entry: Entry, version: str, made: Path) -> Path:
    """The folder of a version: a release, a commit, or a copy of the faulty version with a patch."""
    from workbench.analysis.hunt.releases import unpacked

    if version.endswith(".patch"):
        copy = made / version
        shutil.copytree(packages_of(entry, entry.version, made), copy)
        command = ["git", "apply", "--unidiff-zero", f"--directory={copy.name}", str(PATCHES / version)]
        subprocess.run(command, cwd=made, check=True)
        return copy
    if entry.scheduler == NANO:
        folder = made / version
        if not folder.exists():
            folder.mkdir()
            archive = subprocess.run(
                ["git", "-C", os.environ["NANO_VLLM"], "archive", version], capture_output=True, check=True
            ).stdout
            subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
        return folder
    return Path(os.environ["MINI_SGLANG"]) if entry.scheduler == MINI else unpacked("vllm", version)


def end_of_test(folder: Path, packages: Path, entry: Entry) -> str:
    """The end of the generated test where Workbench cannot be imported: "passed", or the error."""
    environ = environment(packages, entry, has_workbench=False)
    with tempfile.TemporaryDirectory() as elsewhere:
        shutil.copy(folder / "test_finding.py", elsewhere)
        command = [sys.executable, "-c", "import workbench"]
        if not subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True).returncode:
            return "Workbench is installed"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_finding.py"]
        done = subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True, text=True)
    errors = re.findall(r"^E +(\w*Error.*|assert .*)", done.stdout, re.M)
    return "passed" if not done.returncode else errors[0] if errors else done.stdout[-200:] + done.stderr[-200:]


def measure(entry: Entry, seeds: int, seconds: float, made: Path) -> dict[str, Any]:
    """Hunt with each seed, then run the test of the last case found."""
    here = Path(__file__).resolve()
    faulty = packages_of(entry, entry.version, made)
    out = made / entry.name
    command = [sys.executable, str(here), "--entry", entry.name, "--seeds", str(seeds), "--for", str(seconds)]
    environ = environment(faulty, entry, has_workbench=True)
    done = subprocess.run([*command, "--out", str(out)], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [run for run in runs if run["found"]]
    result: dict[str, Any] = {"version": entry.version, "thread": entry.thread, "seeds": seeds, "found": len(found)}
    for name in ("workloads", "cpu_seconds", "requests"):
        result[name] = statistics.median(run[name] for run in found) if found else None
    if found:
        folder = out / found[-1]["folder"]
        result |= {"law": found[-1]["law"], "place": found[-1]["place"]}
        result["test_on_faulty"] = end_of_test(folder, faulty, entry)
        result["mended"] = entry.mended
        result["test_on_mended"] = end_of_test(folder, packages_of(entry, entry.mended, made), entry)
    print(f"{entry.name}: {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    """Measure every entry and save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--for", dest="seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="entries whose name, version or thread contains this")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--entry", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.entry:
        (entry,) = [each for each in ENTRIES if each.name == options.entry]
        hunt_entry(entry, options.seeds, options.seconds, options.out)
        return
    results: dict[str, Any] = {}
    if options.only and (RESULTS / "hunt.json").exists():  # the others stay
        results = json.loads((RESULTS / "hunt.json").read_text())["entries"]
    with tempfile.TemporaryDirectory() as made:
        for entry in ENTRIES:
            if options.only not in f"{entry.name} {entry.version} {entry.thread} {entry.scheduler}":
                continue
            if (name := CHECKOUTS.get(entry.scheduler)) and name not in os.environ:
                print(f"{entry.name}: skipped, {name} does not name a checkout")
                continue
            results[entry.name] = measure(entry, options.seeds, options.seconds, Path(made))
            if not options.no_save:
                save("hunt", {"entries": results})


if __name__ == "__main__":
    main()

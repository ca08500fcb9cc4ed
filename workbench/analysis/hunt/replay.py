"""Runs the cases of findings again, here or on other releases: do they still happen, and since when?"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.analysis.hunt.releases import released, unpacked, with_packages
from workbench.analysis.hunt.target import Fault, Refused, find_target
from workbench.simulation.workload import read_json_workload


def replay(folder: Path) -> tuple[dict[str, Any], Fault | None, str]:
    """Run a finding's workload on the scheduler that is installed.

    Returns:
        The finding, the fault that the run has now (None for none), and the scheduler's version.

    Raises:
        ValueError: The folder holds no finding, or the scheduler refuses its workload.
        OSError: A file cannot be read.
    """
    finding = _finding(folder)
    target = find_target(finding["scheduler"], finding.get("policy") or None)
    try:
        fault = target.run(dict(read_json_workload(folder / "workload.json")))
    except Refused as problem:
        raise ValueError(f"{target.name} {target.version} refuses the workload of {folder}: {problem}") from None
    return finding, fault, target.version


def replay_against(folders: Sequence[Path], against: str) -> int:
    """Run them on another version: in a folder with packages, or a release.

    Args:
        folders: The folders of findings in one scheduler.
        against: A folder that is put in front of the import path, a version, or "A..B": the releases from A to B are
            bisected, and each report tells since when.

    Returns:
        1 if one of them happens there, or in B; else 0.

    Raises:
        ValueError: There is no such version.
    """
    package = str(_finding(folders[0])["scheduler"]).partition(":")[0]
    first, is_range, last = against.partition("..")
    if Path(against).is_dir() or not is_range:
        packages = Path(against) if Path(against).is_dir() else unpacked(package, against)
        command = [sys.executable, "-m", "workbench", "hunt", "replay", *map(str, folders)]
        return subprocess.run(command, env=with_packages(packages)).returncode
    versions = released(package, first, last)

    @functools.cache
    def happening(version: str) -> list[bool]:
        command = [sys.executable, "-m", "workbench.analysis.hunt.replay", *map(str, folders)]
        done = subprocess.run(command, env=with_packages(unpacked(package, version)), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"{package} {version} cannot be driven")
        return list(json.loads(done.stdout.splitlines()[-1]))

    for index, folder in enumerate(folders):
        sentence = since(versions, lambda version, index=index: happening(version)[index])  # type: ignore[misc]
        print(f"{folder.name}: {sentence}")
        _tell(folder, sentence)
    return int(any(happening(last)))


def since(versions: Sequence[str], happens: Callable[[str], bool]) -> str:
    """Since when something happens, by bisection, as a sentence.

    Args:
        versions: From old to new.
        happens: Tells it of a version.
    """
    first, last = versions[0], versions[-1]
    if not happens(last):
        return f"Not in {last}."
    if happens(first):
        return f"In {first} already, and in {last}."
    without, has = 0, len(versions) - 1
    while has - without > 1:
        middle = (without + has) // 2
        without, has = (without, middle) if happens(versions[middle]) else (middle, has)
    return f"Since {versions[has]}; not in {versions[without]}."


def _tell(folder: Path, sentence: str) -> None:
    """Write since when into the finding and its report, instead of an earlier sentence."""
    facts = _finding(folder) | {"since": sentence}
    (folder / "finding.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    report = folder / "report.md"
    lines = report.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("**Since**")]
    place = next((place for place, line in enumerate(lines, 1) if line.startswith("**Version**")), len(lines))
    report.write_text("\n".join([*lines[:place], f"**Since**: {sentence}", *lines[place:], ""]), encoding="utf-8")


def _finding(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "finding.json").read_text(encoding="utf-8")))


def _happens(folder: Path) -> bool:
    """Whether the law of a finding is still broken; not if the scheduler refuses the workload."""
    try:
        finding, fault, _ = replay(folder)
    except ValueError:
        return False
    return fault is not None and fault.law == finding["law"]


if __name__ == "__main__":
    print(json.dumps([_happens(Path(folder)) for folder in sys.argv[1:]]))

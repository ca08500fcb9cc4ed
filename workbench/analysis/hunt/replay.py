"""Runs the cases of findings again, here or on other releases: do they still happen, and since when?

A finding is made to be sent to others, so its files are data. Code is named on the command line, or by a word of
``SCHEDULERS`` and ``POLICIES`` in the file.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.analysis.hunt.releases import released, unpacked, with_packages
from workbench.analysis.hunt.target import Fault, ImportedNothing, Refused, find_target
from workbench.base.field_checks import MAX_INT32, integer, json_object
from workbench.base.outside_files import read_json, read_text
from workbench.base.text import printable, shown
from workbench.base.whole_file import replace_text
from workbench.simulation.workload import read_json_workload, read_workload
from workbench.trace.laws import LAWS

SCHEDULERS = ("workbench", "engine", "vllm")
"""Schedulers that a finding may name; others are named with --scheduler."""

POLICIES = tuple(
    [f"workbench.scheduler.policies:{name}" for name in ("ShortestRemainingFirst", "DecodeFirst", "Deadline")]
    + [f"workbench.scheduler.eviction:{name}" for name in ("Lfu", "Ttl", "TwoZones", "Session", "S3Fifo", "Belady")]
)
"""Policies that a finding may name; others are named with --policy."""

_PACKAGES = {"workbench": "inference-workbench", "engine": "inference-workbench", "vllm": "vllm"}
"""Package of each scheduler on the package index."""

_COUNTS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks", "max_model_len")


def replay(
    folder: Path, scheduler: str | None = None, policy: str | None = None
) -> tuple[dict[str, Any], Fault | None, str]:
    """Run a finding's workload on the scheduler that is installed.

    Args:
        folder: The finding.
        scheduler: As for a hunt; None for that of the finding, which may be one of SCHEDULERS.
        policy: "module:Class"; None for that of the finding, which may be one of POLICIES.

    Returns:
        The finding, the fault that the run has now (None for none), and the scheduler with its version.

    Raises:
        ValueError: The folder holds no finding, its file names code, or the scheduler refuses its workload.
        OSError: A file cannot be read.
    """
    finding = _finding(folder)
    sys.path[:] = [path for path in sys.path if not (Path(path) / "finding.json").exists()]  # "" is the current folder
    try:
        target = find_target(*_named(folder, finding, scheduler, policy))
    except ImportedNothing as problem:
        raise ValueError(f"{problem}; a replay looks at PYTHONPATH and not into the current folder") from None
    workload = _workload(folder / "workload.json")
    told = f"{target.name} {target.version}".strip()
    try:
        return finding, target.run(workload), told
    except Refused as problem:
        raise ValueError(f"{told} refuses the workload of {folder}: {problem}") from None
    except (TypeError, KeyError, AttributeError, IndexError) as problem:
        raise ValueError(
            f"{folder / 'workload.json'}: config cannot be used: {type(problem).__name__}: {problem}"
        ) from None


def _named(
    folder: Path, finding: Mapping[str, Any], scheduler: str | None, policy: str | None
) -> tuple[str, str | None]:
    """The scheduler and the policy of a replay: from the command line, or words that a file may say."""
    chosen = scheduler or _word(folder, finding, "scheduler", SCHEDULERS)
    if policy or chosen not in ("workbench", "engine"):
        return chosen, policy
    return chosen, _word(folder, finding, "policy", POLICIES) if finding.get("policy") else None


def _word(folder: Path, finding: Mapping[str, Any], field: str, words: Collection[str]) -> str:
    name = finding.get(field)
    if isinstance(name, str) and name in words:
        return name
    is_name = isinstance(name, str) and len(name) <= 200 and re.fullmatch(r"(vllm:)?[\w.]+:[\w.]+", name)
    option = f"--{field} {name if is_name else 'module:name'}"
    raise ValueError(
        f"{folder / 'finding.json'}: {field} is {shown(name)}, and a file may only say {', '.join(words)}: no code "
        f"runs because a file names it. If you know that code and trust it, add {option}"
    )


def replay_against(
    folders: Sequence[Path], against: str, scheduler: str | None = None, policy: str | None = None
) -> int:
    """Run them on another version: in a folder with packages, or a release.

    Args:
        folders: The folders of findings in one scheduler.
        against: A folder that is put in front of the import path, a version, or "A..B": the releases from A to B are
            bisected, and each report tells since when.
        scheduler: As in `replay`.
        policy: As in `replay`.

    Returns:
        1 if one of them happens there, or in B; else 0.

    Raises:
        ValueError: There is no such version, a file names code, or ``against`` is a finding.
    """
    chosen = [_named(folder, _finding(folder), scheduler, policy)[0] for folder in folders]
    package = _PACKAGES.get(chosen[0], chosen[0].partition(":")[0])
    if any(_PACKAGES.get(name, name.partition(":")[0]) != package for name in chosen):
        raise ValueError(f"--against needs findings in one scheduler, got {', '.join(dict.fromkeys(chosen))}")
    options = [f"--scheduler={scheduler}"] * bool(scheduler) + [f"--policy={policy}"] * bool(policy)
    first, is_range, last = against.partition("..")
    if Path(against).is_dir() or not is_range:
        packages = _packages(Path(against), folders) if Path(against).is_dir() else unpacked(package, against)
        command = [sys.executable, "-P", "-m", "workbench", "hunt", "replay", *map(str, folders), *options]
        return subprocess.run(command, env=with_packages(packages)).returncode
    versions = released(package, first, last)

    @functools.cache
    def happening(version: str) -> list[bool]:
        work = json.dumps([[str(folder) for folder in folders], scheduler, policy])
        command = [sys.executable, "-P", "-m", "workbench.analysis.hunt.replay", work]
        done = subprocess.run(command, env=with_packages(unpacked(package, version)), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"{package} {version} cannot be driven")
        return list(json.loads(done.stdout.splitlines()[-1]))

    for index, folder in enumerate(folders):
        sentence = since(versions, lambda version, index=index: happening(version)[index])  # type: ignore[misc]
        print(printable(f"{folder.name}: {sentence}"))
        _tell(folder, sentence)
    return int(any(happening(last)))


def _packages(packages: Path, folders: Sequence[Path]) -> Path:
    """A folder to import from, which must not be that of a finding or inside one."""
    home = packages.resolve()
    findings = [folder.resolve() for folder in folders]
    if (home / "finding.json").exists() or any(each == home or each in home.parents for each in findings):
        raise ValueError(f"--against {packages} is the folder of a finding, from which no code is imported")
    return packages


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
    replace_text(folder / "finding.json", json.dumps(facts, indent=1) + "\n")
    report = folder / "report.md"
    lines = read_text(report).splitlines()
    lines = [line for line in lines if not line.startswith("**Since**")]
    place = next((place for place, line in enumerate(lines, 1) if line.startswith("**Version**")), len(lines))
    replace_text(report, "\n".join([*lines[:place], f"**Since**: {sentence}", *lines[place:], ""]))


def _finding(folder: Path) -> dict[str, Any]:
    path = folder / "finding.json"
    finding = dict(json_object(str(path), read_json(path)))
    if "by_trial" in finding:
        raise ValueError(f"{path} is a difference of two schedulers, which no law judges: see workbench hunt --between")
    laws = [law.name for law in LAWS]
    if finding.get("law") not in laws:
        raise ValueError(f"{path}: law must be one of {', '.join(laws)}, got {shown(finding.get('law'))}")
    return finding


def _workload(path: Path) -> dict[str, Any]:
    """The workload of a finding, checked; only a hunt knows ``remote`` of a request."""
    content = json_object(str(path), read_json_workload(path), ("config", "requests"))
    config = json_object("config", content.get("config") or {})
    for name in _COUNTS:
        if config.get(name) is not None:
            integer(f"config.{name}", config[name], 1, MAX_INT32)
    listed = content.get("requests")
    requests = [
        {name: value for name, value in json_object(f"requests[{index}]", request).items() if value is not None}
        for index, request in enumerate(listed if isinstance(listed, list) else ())
    ]
    plain = [{name: value for name, value in request.items() if name != "remote"} for request in requests]
    read_workload({"requests": plain if isinstance(listed, list) else listed})
    for index, request in enumerate(requests):
        if "remote" in request:
            place = f"requests[{index}].remote"
            remote = json_object(place, request["remote"], ("num_tokens", "num_steps", "fails"))
            integer(f"{place}.num_tokens", remote.get("num_tokens"), 0, MAX_INT32)
            integer(f"{place}.num_steps", remote.get("num_steps"), 0, MAX_INT32)
    return {"config": dict(config), "requests": requests}


def _happens(folder: Path, scheduler: str | None, policy: str | None) -> bool:
    """Whether the law of a finding is still broken; not if the scheduler refuses the workload."""
    try:
        finding, fault, _ = replay(folder, scheduler, policy)
    except ValueError:
        return False
    return fault is not None and fault.law == finding["law"]


if __name__ == "__main__":
    _folders, *_options = json.loads(sys.argv[1])
    print(json.dumps([_happens(Path(_folder), *_options) for _folder in _folders]))

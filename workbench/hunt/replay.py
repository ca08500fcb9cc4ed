"""Runs the case of a finding again: does it still happen?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workbench.hunt.target import Fault, Refused, find_target
from workbench.simulation.workload import read_json_workload


def replay(folder: Path) -> tuple[dict[str, Any], Fault | None, str]:
    """Run a finding's workload on the scheduler that is installed.

    Returns:
        The finding, the fault that the run has now (None for none), and the scheduler's version.

    Raises:
        ValueError: The folder holds no finding, or the scheduler refuses its workload.
        OSError: A file cannot be read.
    """
    finding = json.loads((folder / "finding.json").read_text(encoding="utf-8"))
    target = find_target(finding["scheduler"], finding.get("policy") or None)
    try:
        fault = target.run(dict(read_json_workload(folder / "workload.json")))
    except Refused as problem:
        raise ValueError(f"{target.name} {target.version} refuses the workload of {folder}: {problem}") from None
    return finding, fault, target.version


def replay_against(folder: Path, against: str) -> int:
    """Run it on another version: in a folder with packages, or installed from PyPI without its dependencies.

    Args:
        folder: The folder of the finding.
        against: A folder that is put in front of the import path, or a version.

    Returns:
        The exit status of ``workbench hunt replay`` there.

    Raises:
        ValueError: The version cannot be installed.
    """
    if Path(against).is_dir():
        return _replay_with(folder, Path(against))
    finding = json.loads((folder / "finding.json").read_text(encoding="utf-8"))
    package = str(finding["scheduler"]).partition(":")[0]
    with tempfile.TemporaryDirectory() as packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
        done = subprocess.run([*command, f"{package}=={against}"], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(f"--against {against}: {package} cannot be installed: {last}")
        return _replay_with(folder, Path(packages))


def _replay_with(folder: Path, packages: Path) -> int:
    ours = str(Path(__file__).parents[2])
    paths = [str(packages.resolve()), ours, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "workbench", "hunt", "replay", str(folder)]
    return subprocess.run(command, env=environment).returncode

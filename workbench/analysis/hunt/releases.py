"""Released versions of a scheduler's package: each is unpacked once, into a folder for the front of the import path.

    PYTHONPATH=$(python -m workbench.analysis.hunt.releases vllm 0.32.0) workbench hunt --scheduler vllm --out found

Nothing is installed: a release uses the dependencies of the environment. If vLLM's scheduler needs one that the
environment lacks, that one is put beside it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import workbench
from workbench.base.cache_folder import cached, make_folder

_TRY = "from workbench.analysis.hunt.vllm_scheduler import VllmScheduler; VllmScheduler({}).close()"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_MOST_MISSING = 12


def unpacked(package: str, version: str) -> Path:
    """The folder of a release, which is fetched from the package index if it is not in the cache folder.

    Raises:
        ValueError: There is no such release, or vLLM's scheduler cannot be imported from it.
    """
    folder = cached("releases", f"{package}-{version}")
    if not folder.exists():
        make_folder(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            packages = Path(made) / "packages"
            _unpack(f"{package}=={version}", packages)
            if package == "vllm":
                _complete(packages)
            packages.rename(folder)
    return folder


def released(package: str, first: str, last: str) -> list[str]:
    """The versions from one to another, from old to new.

    Raises:
        ValueError: The package index does not have both.
    """
    command = [sys.executable, "-P", "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    versions = found[1].split(", ")[::-1] if found else []
    if not {first, last} <= {*versions} or versions.index(first) > versions.index(last):
        raise ValueError(f"{package} has no releases from {first} to {last}; there are {', '.join(versions) or 'none'}")
    return versions[versions.index(first) : versions.index(last) + 1]


def with_packages(packages: Path) -> dict[str, str]:
    """The environment of a process that imports from a folder first, and Workbench from here.

    Start it with ``-P``: the current folder may be that of a finding, from which nothing is imported.
    """
    paths = [str(packages.resolve()), str(Path(workbench.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _unpack(requirement: str, target: Path) -> None:
    """Unpack a wheel; of vLLM only its Python files, because no scheduler calls its kernels (1 GB)."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(f"{requirement} cannot be fetched: {last}")
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as content:
            is_vllm = requirement.startswith("vllm==")
            names = [name for name in content.namelist() if not is_vllm or name.endswith((".py", "/METADATA"))]
            content.extractall(target, names)


def _complete(packages: Path) -> None:
    """Put dependencies beside vLLM that its scheduler imports and the environment lacks."""
    for _ in range(_MOST_MISSING):
        command = [sys.executable, "-P", "-c", _TRY]
        done = subprocess.run(command, capture_output=True, text=True, env=with_packages(packages))
        if done.returncode == 0:
            return
        found = _MISSING.search(done.stderr)
        needed = _requirements(packages)
        if found is None or found[1] not in needed:
            raise ValueError(f"its scheduler cannot be imported: {done.stderr.strip().splitlines()[-1]}")
        _unpack(needed[found[1]], packages)
    raise ValueError(f"its scheduler needs more than {_MOST_MISSING} packages that are not installed")


def _requirements(packages: Path) -> dict[str, str]:
    """The requirements of the packages in a folder, by the name of its module."""
    lines = []
    for metadata in packages.glob("*.dist-info/METADATA"):
        lines += re.findall(r"^Requires-Dist: ([^;\n]*)", metadata.read_text(encoding="utf-8"), re.M)
    return {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_"): line.strip() for line in lines}


if __name__ == "__main__":
    print(unpacked(*sys.argv[1:]))

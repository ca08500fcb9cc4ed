"""Pyodide, the CPython of the page, and msgspec for it: where they are, and how to fetch them once.

They are not part of the package. `fetch` puts them into the cache folder: Pyodide with npm, msgspec with pip, both
checked against the checksums in this file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from workbench.ground.cache_folder import cache_folder, make_folder

PYODIDE_VERSION = "314.0.7"
PYODIDE_SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
MSGSPEC_VERSION = "0.22.0"
MSGSPEC_WHEEL = f"msgspec-{MSGSPEC_VERSION}-cp314-cp314-pyemscripten_2026_0_wasm32.whl"
MSGSPEC_SHA256 = "a66b1766311e42371e509c996c3933b161c7ae0eabdf361af5316dec197e1022"

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""The files of npm's package that a page needs."""


def runtime_folder() -> Path:
    """The folder that holds the files of the page's Python; it may not exist yet."""
    return cache_folder() / f"pyodide-{PYODIDE_VERSION}"


def is_fetched(folder: Path | None = None) -> bool:
    """Whether a folder holds everything that the page needs."""
    folder = folder or runtime_folder()
    return all((folder / name).is_file() for name in (*FILES, MSGSPEC_WHEEL))


def fetch() -> Path:
    """Fetch Pyodide and msgspec, unless they are there; needs npm and a network.

    Returns:
        The folder that holds them.

    Raises:
        OSError: npm is missing, a download failed, or a file is not the expected one.
    """
    target = runtime_folder()
    if is_fetched(target):
        return target
    npm = shutil.which("npm")
    if npm is None:
        raise OSError(
            "npm is not installed, and Pyodide comes from it: install Node.js, or copy the folder "
            f"{target} from a machine that has it"
        )
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".pyodide-", dir=target.parent) as name:
        folder = Path(name)
        _run([npm, "pack", "--silent", f"pyodide@{PYODIDE_VERSION}"], folder)
        archive = folder / f"pyodide-{PYODIDE_VERSION}.tgz"
        _check(archive, PYODIDE_SHA256)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        tag = ["--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14"]
        _run([*pip, *tag, "--abi", "cp314", f"msgspec=={MSGSPEC_VERSION}"], folder)
        _check(folder / MSGSPEC_WHEEL, MSGSPEC_SHA256)
        complete = folder / "complete"
        complete.mkdir()
        with tarfile.open(archive) as files:
            for file in FILES:
                content = files.extractfile(f"package/{file}")
                assert content is not None, "the checksum has been compared"
                (complete / file).write_bytes(content.read())
        (folder / MSGSPEC_WHEEL).replace(complete / MSGSPEC_WHEEL)
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one
        complete.replace(target)
    return target


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OSError(f"{Path(command[0]).name} could not fetch what the playground needs: {reason}")


def _check(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise OSError(f"{path.name} has the SHA-256 {found} instead of {expected}: it is another file; try again")

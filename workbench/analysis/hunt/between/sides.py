"""The two schedulers of a comparison: by name, folder, environment, release or file, each in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import workbench
from workbench.base.outside_files import read_text

_PACKAGE = Path(workbench.__file__).parent
_SIDE = _PACKAGE / "analysis" / "hunt" / "between" / "side.py"
_KINDS = (
    "workbench, vllm, vllm:module:Class, module:factory, a release such as 0.33.0, a folder or an environment with "
    "vLLM, a checkout of Workbench, or a changed file such as scheduler.py"
)
CLOSE_SECONDS = 5.0
"""Seconds that a side may take to end."""

_OURS = re.compile(r"^\s*(from|import) workbench\b", re.M)


@dataclass
class Place:
    """The source of a scheduler.

    Attributes:
        spec: As on the command line.
        scheduler: Its name for `workbench.analysis.hunt.target.find_target`.
        python: The interpreter; "" for that of the other side, or of this process.
        packages: Folder at the front of the import path; "" for none.
        redirect: Modules that are imported from other places.
        file: A changed file of vLLM, whose module is known once the other side is; None without one.
    """

    spec: str
    scheduler: str
    python: str = ""
    packages: str = ""
    redirect: dict[str, str] = field(default_factory=dict)
    file: Path | None = None


def place_of(spec: str) -> Place:
    """The place that a word of the command line names.

    Raises:
        ValueError: It names none.
    """
    if spec in ("workbench", "vllm") or re.fullmatch(r"[\w.]+:[\w.:]+", spec):
        return Place(spec, spec)
    path = Path(spec)
    if path.is_dir():
        return _folder(spec, path.resolve())
    if path.is_file():
        if _OURS.search(read_text(path)) is None:
            return Place(spec, "vllm", file=path.resolve())
        module = f"workbench.scheduler.{path.stem}"
        if not (_PACKAGE / "scheduler" / path.name).exists():
            raise ValueError(f"--between {spec}: Workbench has no scheduler/{path.name} that this file could stand for")
        return Place(spec, "workbench", redirect={module: str(path.resolve())})
    if re.fullmatch(r"\d+(\.\w+)+", spec):
        from workbench.analysis.hunt.releases import unpacked

        return Place(spec, "vllm", packages=str(unpacked("vllm", spec)))
    raise ValueError(f"--between {spec!r} is not a scheduler and not a folder or file: give {_KINDS}")


def _folder(spec: str, path: Path) -> Place:
    if (path / "bin" / "python").exists():
        return Place(spec, "vllm", python=str(path / "bin" / "python"))
    if (path / "vllm" / "__init__.py").exists():
        return Place(spec, "vllm", packages=str(path))
    if (path / "workbench" / "scheduler" / "__init__.py").exists():
        return Place(spec, "workbench", redirect={"workbench.scheduler": str(path / "workbench" / "scheduler")})
    raise ValueError(
        f"--between {spec}: the folder has no bin/python, no vllm and no workbench/scheduler: give {_KINDS}"
    )


def both(spec_a: str, spec_b: str, python: str = "") -> tuple[Place, Place]:
    """The places of the two sides. A folder of packages, and a file, take what they lack from the other side.

    Args:
        spec_a: A word of the command line.
        spec_b: The other one.
        python: The interpreter of vLLM's environment, for a side that has none; "" for this one.

    Raises:
        ValueError: One of them names no scheduler.
    """
    places = place_of(spec_a), place_of(spec_b)
    for one, other in (places, places[::-1]):
        if one.file is not None and other.file is not None:
            raise ValueError("--between: one side is a changed file, so the other must be what was changed")
        if one.scheduler.startswith("vllm") and not one.python:
            one.python = other.python or python
        if one.file is not None:
            one.packages = other.packages
    return places


class Asked:
    """A side's process.

    Args:
        place: The source of its scheduler.
        as_vllm: Workbench's scheduler keeps vLLM's waits.

    Attributes:
        version: The scheduler's version.
        features: Its features.
        roots: {folder or file: name} of its code.
        hooks: The methods of vLLM's classes that the class under test overrides.

    Raises:
        ValueError: It cannot be started.
    """

    def __init__(self, place: Place, *, as_vllm: bool) -> None:
        self.place = place
        redirect, places = (
            dict(place.redirect),
            {path: f"scheduler/{Path(path).name}" for path in place.redirect.values()},
        )
        if place.file is not None:
            module, name = self._stands_for(place)
            redirect, places = {module: str(place.file)}, {str(place.file): name}
        elif "workbench.scheduler" in redirect:
            places = {redirect["workbench.scheduler"]: "scheduler"}
        given = {
            "package": str(_PACKAGE),
            "scheduler": place.scheduler,
            "as_vllm": as_vllm or place.scheduler != "workbench",
            "redirect": redirect,
            "places": places,
            "behind": [str(Path.cwd())] if ":" in place.scheduler else [],
        }
        self._process = subprocess.Popen(
            [place.python or sys.executable, "-P", str(_SIDE), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(place),
            start_new_session=True,  # Ctrl-C is for the comparison, which closes its sides
        )
        told = self._read()
        if "problem" in told:
            self.close()
            raise ValueError(f"--between {place.spec}: {told['problem']}")
        self.version, self.features, self.roots = told["version"], told["features"], told["roots"]
        self.hooks: list[str] = told["hooks"]

    @property
    def package(self) -> Path | None:
        """The folder of its package; None if it is not known."""
        folders = [Path(root) for root in self.roots if Path(root).is_dir()]
        return folders[0] if folders else None

    @staticmethod
    def _stands_for(place: Place) -> tuple[str, str]:
        """The module of vLLM that a file stands for, and its name."""
        assert place.file is not None
        code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
        command = [place.python or sys.executable, "-P", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(place))
        if done.returncode:
            raise ValueError(f"--between {place.spec}: there is no vLLM whose file it could stand for")
        root = Path(done.stdout.strip().splitlines()[-1])
        found = sorted((root / "v1" / "core").rglob(place.file.name))
        if len(found) != 1:
            known = sorted(path.name for path in (root / "v1" / "core").rglob("*.py"))
            raise ValueError(
                f"--between {place.spec}: vLLM has no v1/core file of that name; it has {', '.join(known)}"
            )
        parts = found[0].relative_to(root).with_suffix("").parts
        return ".".join(("vllm", *parts)), "/".join(("vllm", *parts)) + ".py"

    def send(self, asked: dict[str, Any]) -> None:
        """Ask, and read the answer later."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return json.loads(line)

    def _gone(self) -> ValueError:
        return ValueError(f"--between {self.place.spec}: its process ended; its last words are above")

    def read(self) -> Any:
        """The answer to what was sent."""
        return self._read()

    def ask(self, asked: dict[str, Any]) -> Any:
        """Ask and wait for the answer."""
        self.send(asked)
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it did not read what it was asked last
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # in a step that does not end
            self._process.kill()
            self._process.wait()


def _environment(place: Place) -> dict[str, str]:
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    if place.packages:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (place.packages, os.environ.get("PYTHONPATH", ""))))
    return environment

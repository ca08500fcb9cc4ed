"""The lines of a scheduler that ran, step by step, and those that ran on one side only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.schedule import Kept

Line = tuple[str, str, int]
"""File within its root, qualified name of the function, and line."""


class Places:
    """The files of a scheduler, named as within its package.

    Args:
        folders: The folders of its code.
        others: Files that stand for others: {path: name}.
    """

    def __init__(self, folders: Sequence[str], others: Mapping[str, str]) -> None:
        self.roots = {str(Path(folder)): Path(folder).name for folder in folders} | dict(others)
        self._names: dict[str, str] = {}

    def name(self, file: str) -> str:
        """The name of a file; "" if it is not one of the scheduler's."""
        if (known := self._names.get(file)) is not None:
            return known
        found = self._names[file] = self._find(file)
        return found

    def _find(self, file: str) -> str:
        for root, name in sorted(self.roots.items(), key=lambda item: -len(item[0])):
            if file == root:
                return name
            if file.startswith(root + "/") and "site-packages" not in file.removeprefix(root):
                return f"{name}/{file.removeprefix(root + '/')}"
        return ""


class Followed(Kept):
    """Keeps the lines that run, besides the steps; what runs between two steps belongs to the second."""

    def __init__(self, places: Places, *, cache: bool = False) -> None:
        super().__init__(cache=cache)
        self._places = places
        self._lines: list[list[Line]] = [[]]
        self._codes: dict[CodeType, str] = {}
        sys.settrace(self._called)

    def scheduled(self, run: Run, plan: Any) -> None:
        """Keep what was decided. The step is over, unless an output comes in."""
        super().scheduled(run, plan)
        if not run.takes_output:
            self._lines.append([])

    def updated(self, run: Run, plan: Any, latest: Any, ended: Mapping[str, str]) -> None:
        """A step is over with the output that came in."""
        super().updated(run, plan, latest, ended)
        self._lines.append([])

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = self._codes.get(frame.f_code)
        if name is None:
            name = self._codes[frame.f_code] = self._places.name(frame.f_code.co_filename)
        if not name:
            return None
        function = frame.f_code.co_qualname
        lines = self._lines[-1]

        def ran(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.append((name, function, frame.f_lineno))
            return ran

        return ran

    def ran(self) -> list[list[Line]]:
        """The lines of each step, in order; ends the following."""
        sys.settrace(None)
        return self._lines

"""Grades copies of the course.

The reader's answer is one cell. It is taken out of the copy and run between cells of the course itself, in a separate
process (`workbench.apps.course.judge`): whatever else is in the copy, outputs included, changes no grade. Equal answers
are run once. All answers are read before the first one runs, and a copy that cannot be read loses its own points.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.apps.course.exercise import Exercise, told
from workbench.apps.course.judge import judge_apart
from workbench.apps.course.verdict import Verdict
from workbench.base.outside_files import read_json
from workbench.base.text import shown

TIMEOUT = 120.0
"""Seconds that an answer may take, the import of its libraries included."""

NEEDED = "exercise"
"""Tag of a cell above an exercise that its answer needs."""

MAX_NOTEBOOK = 2**26
"""Bytes of the largest notebook that is read (64 MiB)."""

MAX_ANSWER = 2**20
"""Characters of the longest answer."""

_HINT = re.compile(r"Hint 1</summary>\s*(.*?)\s*<", re.DOTALL)


@dataclass(frozen=True)
class Grade:
    """The points of an exercise in a copy, with the reason.

    Attributes:
        copy: Name of the copy.
        notebook: File name of the notebook.
        exercise: Name of the exercise.
        points: Points reached.
        of: Points of a right answer.
        reason: The checker's message.
        hint: The first hint of the exercise for a wrong answer, otherwise "".
    """

    copy: str
    notebook: str
    exercise: str
    points: int
    of: int
    reason: str
    hint: str


def exercises(course: Path) -> list[Exercise]:
    """The exercises of a course, in the order of its notebooks.

    Args:
        course: Folder of the notebooks.
    """
    return [exercise for path in sorted(course.glob("*.ipynb")) for exercise in _exercises_of(path)]


def _exercises_of(path: Path) -> Iterator[Exercise]:
    imports: list[str] = []
    needed: list[str] = []
    text, answer, name = "", "", ""
    for cell in _cells(path):
        source, marks = _source(cell), cell["metadata"].get("nbgrader", {})
        if cell["cell_type"] == "markdown":
            text = source
        elif marks.get("solution"):
            answer, name = source, marks["grade_id"]
        elif marks.get("grade"):
            hint = _HINT.search(text)
            yield Exercise(
                name,
                path.name,
                tuple(imports),
                "\n".join(needed),
                answer,
                source,
                hint[1] if hint else "",
                marks["points"],
            )
        else:
            imports += [name for line in ast.parse(source).body for name in _imports(line)]
            if NEEDED in cell["metadata"].get("tags", []):
                needed.append(source)


def _imports(line: ast.stmt) -> Iterator[str]:
    """The imports of a line, a name each."""
    if isinstance(line, ast.Import | ast.ImportFrom):
        for alias in line.names:
            one = ast.Import([alias]) if isinstance(line, ast.Import) else ast.ImportFrom(line.module, [alias], 0)
            yield ast.unparse(one)


def find_copies(folder: Path) -> dict[str, Path]:
    """The copies of the course in a folder by their names: the folder itself, or the folders in it.

    Raises:
        ValueError: There is not a notebook in the folder, nor in a folder of it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name a copy of the course, or a folder of copies")
    if any(folder.glob("*.ipynb")):
        return {folder.resolve().name: folder}
    copies = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and any(path.glob("*.ipynb"))}
    if not copies:
        raise ValueError(f"{folder} holds no copy of the course: neither NAME.ipynb nor COPY/NAME.ipynb")
    return copies


def grade(folder: Path, course: Path, *, jobs: int = 2, timeout: float = TIMEOUT) -> list[Grade]:
    """Grade every exercise of every copy in a folder.

    Args:
        folder: A copy of the course, or a folder of copies.
        course: Folder of the course's own notebooks.
        jobs: Number of answers that run at the same time.
        timeout: Seconds that an answer may take.

    Raises:
        ValueError: The folder holds no copy.
        OSError: A notebook cannot be read.
    """
    known = exercises(course)
    answers: dict[tuple[str, Exercise], str | Verdict] = {}
    for copy, place in find_copies(folder).items():
        for exercise in known:
            answers[copy, exercise] = _answer(place / exercise.notebook, exercise)
    distinct = {(exercise, found): None for (_, exercise), found in answers.items() if isinstance(found, str)}
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda pair: _verdict(pair[0], pair[1], course, timeout), distinct)
        judged = dict(zip(distinct, verdicts, strict=True))
    return [
        _graded(copy, exercise, judged[exercise, found] if isinstance(found, str) else found)
        for (copy, exercise), found in answers.items()
    ]


def _graded(copy: str, exercise: Exercise, verdict: Verdict) -> Grade:
    points, hint = (exercise.points, "") if verdict else (0, exercise.hint)
    return Grade(copy, exercise.notebook, exercise.name, points, exercise.points, verdict.message, hint)


def _verdict(exercise: Exercise, answer: str, course: Path, timeout: float) -> Verdict:
    try:
        return judge_apart(exercise, answer, course, timeout)
    except Exception as problem:  # such as a process that cannot be started: it costs this answer's points
        return Verdict(False, f"it cannot be judged: {told(problem)}")


def _answer(path: Path, exercise: Exercise) -> str | Verdict:
    """The answer in a notebook, or why there is none."""
    try:
        if not path.is_file():
            return Verdict(False, "the notebook is missing")
        if path.resolve().parent != path.parent.resolve():
            return Verdict(False, "the notebook is a link to another folder: copy the file")
        found = [c for c in _cells(path) if c["metadata"].get("nbgrader", {}).get("grade_id") == exercise.name]
        if len(found) != 1:
            return Verdict(
                False, f"{len(found)} cells have the grade_id {exercise.name!r}, expected 1: copy the course again"
            )
        answer = _source(found[0])
    except Exception as problem:  # a notebook may hold anything; it costs the points of this copy alone
        return Verdict(False, f"{path.name} is not a notebook: {told(problem)}")
    if len(answer) > MAX_ANSWER:
        return Verdict(False, f"the answer has {len(answer):,} characters, {MAX_ANSWER:,} are allowed")
    return Verdict(False, "not answered yet") if answer.split() == exercise.answer.split() else answer


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = read_json(path, MAX_NOTEBOOK)["cells"]
    return cells


def _source(cell: Mapping[str, Any]) -> str:
    lines = cell["source"]
    if not isinstance(lines, str) and not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
        raise ValueError(f"source must be a text or a list of lines, got {shown(lines)}")
    return "".join(lines)

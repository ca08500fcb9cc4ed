"""Grades copies of the course.

The reader's answer is one cell. It is taken out of the copy and run between cells of the course itself, in a separate
process (`workbench.course.judge`): whatever else is in the copy, outputs included, changes no grade. Equal answers are
run once. All answers are read before the first one runs, and a copy that cannot be read loses its own points.
"""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.course.judge import judge_apart
from workbench.course.verdict import Verdict
from workbench.ground.field_checks import shown
from workbench.ground.outside_files import read_json

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
class Exercise:
    """An exercise of the course.

    Attributes:
        name: Its ``grade_id``, such as "slots".
        notebook: File name of its notebook.
        imports: The notebook's imports, a name each. Those that are needed run before an answer.
        needed: The cells with the tag "exercise", which run then.
        answer: The answer cell of the course, which is wrong.
        check: The cell that judges the answer.
        hint: The first hint.
        points: Points of a right answer.
    """

    name: str
    notebook: str
    imports: Sequence[str]
    needed: str
    answer: str
    check: str
    hint: str
    points: int

    def judge(self, answer: str) -> Verdict:
        """Run an answer in this process, and judge it.

        The check sees the course's own names, whatever the answer has done to them: it adds names, and changes none.
        """
        names: dict[str, Any] = {"__name__": "__main__"}
        words = set(re.findall(r"\w+", f"{self.needed} {answer} {self.check}"))
        imports = "\n".join(line for line in self.imports if line.split()[-1] in words)
        try:
            exec(_compiled(imports, "<the notebook>"), names)  # noqa: S102 (the course's own code)
            own, checkers = dict(names), _checkers()
            exec(_compiled(self.needed, "<the notebook>"), names)  # noqa: S102 (the course's own code)
            exec(_compiled(answer, "<the answer>"), names)  # noqa: S102 (what grading is for)
            for module, before in checkers:
                vars(module).update(before)
            if self._check_reads(self.needed):
                exec(_compiled(self.needed, "<the notebook>"), own)  # noqa: S102 (the course's own code)
            kept = _bound(self.answer)
            names = {**names, **{name: value for name, value in own.items() if name not in kept}}
            verdict = eval(_compiled(self.check, "<the check>", "eval"), names)  # noqa: S307 (the course's own code)
        except Exception as problem:
            line = next(
                (f.lineno for f in traceback.extract_tb(problem.__traceback__) if f.filename == "<the answer>"), 0
            )
            where = f"line {line}: " if line else ""
            return Verdict(False, f"{where}{_told(problem)}")
        assert type(verdict) is Verdict
        return verdict

    def _check_reads(self, cell: str) -> bool:
        """Whether the check reads a name that a cell binds."""
        return not _bound(cell).isdisjoint(re.findall(r"\w+", self.check))


def _bound(source: str) -> set[str]:
    """The names that a cell of the course binds."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def _checkers() -> list[tuple[Any, dict[str, Any]]]:
    """The modules of the course with what they hold."""
    return [(module, dict(vars(module))) for name, module in sys.modules.items() if name.startswith(__package__)]


def _told(problem: BaseException) -> str:
    """Class and message of an exception, whose message an answer may have made impossible."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:
        return f"{type(problem).__name__}, whose message cannot be made"


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
        ValueError: There is no notebook in the folder, nor in a folder of it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name a copy of the course, or a folder of copies")
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
        return Verdict(False, f"it cannot be judged: {_told(problem)}")


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
        return Verdict(False, f"{path.name} is no notebook: {_told(problem)}")
    if len(answer) > MAX_ANSWER:
        return Verdict(False, f"the answer has {len(answer):,} characters, {MAX_ANSWER:,} are allowed")
    return Verdict(False, "not answered yet") if answer.split() == exercise.answer.split() else answer


def _compiled(source: str, name: str, mode: str = "exec") -> Any:
    """Code without the ``__future__`` imports of this file."""
    return compile(source, name, mode, dont_inherit=True)


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = read_json(path, MAX_NOTEBOOK)["cells"]
    return cells


def _source(cell: Mapping[str, Any]) -> str:
    lines = cell["source"]
    if not isinstance(lines, str) and not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
        raise ValueError(f"source must be a text or a list of lines, got {shown(lines)}")
    return "".join(lines)

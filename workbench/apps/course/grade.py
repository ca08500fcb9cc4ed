"""Grades copies of the course.

The reader's answer is one cell. It is taken out of the copy and run between cells of the course itself, in a separate
process: whatever else is in the copy, outputs included, changes no grade. Equal answers are run once.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.apps.course.verdict import Verdict

TIMEOUT = 120.0
"""Seconds that an answer may take, the import of its libraries included."""

NEEDED = "exercise"
"""Tag of a cell above an exercise that its answer needs."""

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
        """Run an answer in this process, and judge it."""
        names: dict[str, Any] = {"__name__": "__main__"}
        words = set(re.findall(r"\w+", f"{self.needed} {answer} {self.check}"))
        before = [*(line for line in self.imports if line.split()[-1] in words), self.needed]
        try:
            exec(_compiled("\n".join(before), "<the notebook>"), names)  # noqa: S102 (the course's own code)
            exec(_compiled(answer, "<the answer>"), names)  # noqa: S102 (what grading is for)
            verdict = eval(_compiled(self.check, "<the check>", "eval"), names)  # noqa: S307 (the course's own code)
        except Exception as problem:
            line = next(
                (f.lineno for f in traceback.extract_tb(problem.__traceback__) if f.filename == "<the answer>"), 0
            )
            where = f"line {line}: " if line else ""
            return Verdict(False, f"{where}{type(problem).__name__}: {problem}")
        assert isinstance(verdict, Verdict)
        return verdict


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
    places = [folder] if any(folder.glob("*.ipynb")) else sorted(path for path in folder.iterdir() if path.is_dir())
    copies = {path.resolve().name: path for path in places if any(path.glob("*.ipynb"))}
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
        verdicts = pool.map(lambda pair: _judge_apart(pair[0], pair[1], course, timeout), distinct)
        judged = dict(zip(distinct, verdicts, strict=True))
    return [
        _graded(copy, exercise, judged[exercise, found] if isinstance(found, str) else found)
        for (copy, exercise), found in answers.items()
    ]


def _graded(copy: str, exercise: Exercise, verdict: Verdict) -> Grade:
    points, hint = (exercise.points, "") if verdict else (0, exercise.hint)
    return Grade(copy, exercise.notebook, exercise.name, points, exercise.points, verdict.message, hint)


def _answer(path: Path, exercise: Exercise) -> str | Verdict:
    """The answer in a notebook, or why there is none."""
    if not path.is_file():
        return Verdict(False, "the notebook is missing")
    try:
        found = [c for c in _cells(path) if c["metadata"].get("nbgrader", {}).get("grade_id") == exercise.name]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        return Verdict(False, f"{path.name} is no notebook: {problem}")
    if len(found) != 1:
        return Verdict(
            False, f"{len(found)} cells have the grade_id {exercise.name!r}, expected 1: copy the course again"
        )
    answer = _source(found[0])
    return Verdict(False, "not answered yet") if answer.split() == exercise.answer.split() else answer


def _judge_apart(exercise: Exercise, answer: str, course: Path, timeout: float) -> Verdict:
    """Judge an answer in a new process."""
    command = [sys.executable, "-W", "ignore", "-m", "workbench.apps.course.grade"]
    work = json.dumps({"exercise": asdict(exercise), "answer": answer})
    surroundings = {**os.environ, "PYTHONHASHSEED": "0", "WORKBENCH_DEVICE": "cpu"}
    try:
        done = subprocess.run(
            command, input=work, capture_output=True, text=True, timeout=timeout, cwd=course, env=surroundings
        )
        return Verdict(**json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Verdict(False, f"it took more than {timeout:g} s")
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Verdict(False, f"it ended the process with status {done.returncode}: {last[0]}")


def _compiled(source: str, name: str, mode: str = "exec") -> Any:
    """Code without the ``__future__`` imports of this file."""
    return compile(source, name, mode, dont_inherit=True)


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _main() -> None:
    """Judge the answer on standard input; what it prints goes to standard error."""
    work = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        verdict = Exercise(**work["exercise"]).judge(work["answer"])
    print(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    _main()

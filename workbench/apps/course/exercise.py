"""An exercise of the course: its answer cell runs between the course's own cells, and the check judges it."""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.apps.course.verdict import Verdict


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
            return Verdict(False, f"{where}{told(problem)}")
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


def told(problem: BaseException) -> str:
    """Class and message of an exception, whose message an answer may have made impossible."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:
        return f"{type(problem).__name__}, whose message cannot be made"


def _compiled(source: str, name: str, mode: str = "exec") -> Any:
    """Code without the ``__future__`` imports of this file."""
    return compile(source, name, mode, dont_inherit=True)

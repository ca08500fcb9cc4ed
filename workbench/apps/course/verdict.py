"""The verdict of a checker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.base.on_demand import np


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and if not, an example that shows it.

    Attributes:
        passed: True for a right answer.
        message: Message for the reader; for a wrong answer it names the inputs, the result and the expected value.
    """

    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{'Right' if self.passed else 'Not yet'}: {self.message}"

    def _repr_html_(self) -> str:
        return f"<p><b>{'Right' if self.passed else 'Not yet'}</b>: {escape(self.message)}</p>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The verdict for people; if nbgrader runs the notebook, also the points, which it reads from the text."""
        text = f"{self.passed:d}" if os.environ.get("NBGRADER_EXECUTION") else repr(self)
        return {"text/plain": text, "text/html": self._repr_html_()}


def try_cases(
    answer: Callable[..., Any], cases: Iterable[tuple[Mapping[str, Any], Any]], equal: Callable[[Any, Any], bool]
) -> Verdict:
    """Call an answer with the arguments of each case until a result differs from the expected one.

    Args:
        answer: The reader's function. An exception in it is a wrong answer, not an error of the checker.
        cases: Pairs of keyword arguments and the expected result.
        equal: Function of a result and the expected result: whether they agree.
    """
    num_cases = 0
    for arguments, expected in cases:
        num_cases += 1
        shown = ", ".join(f"{name}={_short(value)}" for name, value in arguments.items())
        try:
            result = answer(**arguments)
        except Exception as problem:
            return Verdict(False, f"{shown} raises {type(problem).__name__}: {problem}")
        if result is None and expected is not None:
            return Verdict(False, f"{shown} gives None, expected {_short(expected)}. Is there a return?")
        try:
            right = equal(result, expected)
        except (TypeError, ValueError):  # the types cannot be compared
            right = False
        if not right:
            return Verdict(False, f"{shown} gives {_difference(result, expected)}.")
    return Verdict(True, f"{num_cases} cases agree.")


def _difference(result: Any, expected: Any) -> str:
    """The difference from the expected result: the first different cell of a matrix, otherwise the whole value."""
    if not hasattr(expected, "shape"):
        return f"{_short(result)}, expected {_short(expected)}"
    if np.shape(result) != expected.shape:
        return f"shape {np.shape(result)}, expected {expected.shape}"
    row, column = np.argwhere(np.asarray(result) != expected)[0]
    return f"{np.asarray(result)[row, column]!s} in row {row}, column {column}, expected {expected[row, column]!s}"


def _short(value: Any, limit: int = 400) -> str:
    if getattr(value, "ndim", 0) > 1:
        return f"a matrix of shape {value.shape}"
    if hasattr(value, "tolist"):
        value = value.tolist()
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."

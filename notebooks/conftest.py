"""Run notebooks in tests at their sizes for slow machines, and check their output.

nbmake proves that no cell raises. `complaints` finds other faults: a picture that was not drawn, a warning, an expected
error that did not occur.
"""

from __future__ import annotations

import ast
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from nbformat import NotebookNode
from nbmake.nb_result import NotebookError, NotebookResult
from nbmake.nb_run import NotebookRun

from workbench.apps.course.notebook_client import WakingOutput
from workbench.trace.readings.computed_by import KERNELS

VARIABLES = {"WORKBENCH_HEADLESS": "1", "WORKBENCH_PREFLIGHT": "remembered", "WORKBENCH_WAIT_FOR_COMPILED": "1"}
"""Environment of the kernels. No notebook breaks what the checks of a model are there for, so they are made once. Cells
assert tokens, so all steps take the same way."""

UGLY = re.compile(r"np\.(float|int)\d+\(|<[\w.]+ object at 0x|\bnan\b")
"""Output that a reader should not see: numpy's repr of a number, an address, NaN."""

COMPILING = re.compile(r"compiling and checking the \w+ attention kernel .*|\d+\.\d s")
"""Words of an engine on standard error when it tries its kernel on a GPU for the first time."""


WORDS = "|".join(re.escape(words).replace("'", r"\W.{0,5}") for words in KERNELS.values())  # an apostrophe is escaped
RUNS_ON = re.compile(rf"{WORDS}|compiled code on the CPU|CPU, \w")
"""The device and the kernel, as engines and steps name them."""


def complaints(notebook: NotebookNode) -> list[str]:
    """The faults in the outputs of an executed notebook, each with the index of its cell."""
    cells = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    first = next(((index, cell) for index, cell in cells if re.search(r"\bEngine\(", cell.source)), None)
    silent = first is not None and not RUNS_ON.search(str(first[1].outputs))
    unsaid = [f"cell {first[0]}: does not say what its engine runs on"] if first is not None and silent else []
    return unsaid + [
        f"cell {index}: {problem}"
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
        for problem in _complaints_of(cell)
    ]


def _complaints_of(cell: NotebookNode) -> Iterator[str]:
    tags, marks = cell.metadata.get("tags", []), cell.metadata.get("nbgrader", {})
    texts = [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
    shown = [output.data for output in cell.outputs if output.output_type in ("execute_result", "display_data")]
    texts += [data.get("text/plain", "") for data in shown if "text/html" not in data]
    errors = [output for output in cell.outputs if output.output_type == "error"]
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr" and "warns" not in tags:
            if text := COMPILING.sub("", output.text).strip():
                yield f"writes to stderr: {text[-200:]}"
    if not cell.outputs and "check" not in tags and not marks.get("solution"):
        yield "shows nothing"
    for text in texts:
        if ugly := UGLY.search(text):
            yield f"prints {ugly.group()!r}"
    if "raises-exception" in tags:
        if [error.ename for error in errors] not in (["ValueError"], ["FieldError"]):
            yield "should end with a ValueError that says what to do"
    elif cell.outputs and isinstance(ast.parse(cell.source).body[-1], ast.Expr) and not shown and not texts:
        yield "ends with an expression that has no output"
    if "viz" in tags and not any(_is_picture(data) for data in shown):
        yield "shows no picture"
    if marks.get("grade") and "Not yet" not in str(shown):
        yield "the exercise is committed solved, or its checker printed nothing"


PAPER = '<rect width="100%" height="100%" fill="#fff"/>'
"""The background of a static picture."""


def _is_picture(data: dict[str, Any]) -> bool:
    html = data.get("text/html", "")
    html += "".join(b64decode(image).decode() for image in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html))
    drawn = re.search(r"<svg.*?<(polygon|rect|path|circle)|<table.*?<td", html.replace(PAPER, ""), re.DOTALL)
    return bool(drawn) or "application/vnd.jupyter.widget-view+json" in data


def _looked_at(run: NotebookRun) -> NotebookResult:
    result: NotebookResult = _execute(run)
    if result.error is None and (found := complaints(result.nb)):
        index = int(found[0].split()[1].removesuffix(":"))
        result = replace(result, error=NotebookError(found[0], "\n".join(found), index))
    return result


_execute = NotebookRun.execute
_before: dict[str, str | None] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a notebook's kernel starts."""
    _before.update({name: os.environ.get(name) for name in VARIABLES})
    os.environ.update(VARIABLES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """While nbmake runs a notebook."""
    with patch.object(NotebookRun, "execute", _looked_at), patch("nbclient.client.OutputWidget", WakingOutput):
        return (yield)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a notebook has ended: other tests run in the normal mode."""
    for name, value in _before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value

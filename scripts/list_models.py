"""Write the table of architectures in docs/models.md: ``python scripts/list_models.py [--check]``.

Every architecture of the installed mlx-lm is tried with a random tiny model (`tests/support/tiny_configurations.py`):
an engine is made, whose preflight decides how the model is served, and its tokens are compared with those of the model
alone. Another process does this, so that an architecture that ends its process or never returns becomes a line of the
table. ``python scripts/list_models.py NAME ...`` tries some architectures and prints their lines.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from generated_files import write_or_check

if TYPE_CHECKING:
    import mlx.nn as nn

    from workbench.models.preflight_result import PreflightResult

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- begin architectures -->\n", "<!-- end architectures -->\n"
TIME_LIMIT_S = 120.0
"""Wall time for one architecture, which takes about a second on an idle machine."""
STOP_S = 10.0
"""Time for the other process to end by itself."""
PROMPTS = ((17, 3), (5, 8))
"""Seed and length of each prompt."""
MAX_TOKENS = 5
SERVED = ("kernel", "gather", "state", "refused", "not tried")


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        architecture: mlx-lm's ``model_type``.
        keeps: Kinds of its layers' caches, such as "all tokens, window"; "" if it is not served.
        served: "kernel", "gather", "state" (no layer has attention), "refused" or "not tried".
        reason: Why it is not served with a kernel, "" if it is.
    """

    architecture: str
    keeps: str
    served: str
    reason: str

    def __str__(self) -> str:
        return f"| {' | '.join(cell.replace('|', '') for cell in self)} |".replace("|  |", "| |")


def architectures() -> list[str]:
    """The modules of mlx-lm that have a model, found without importing them: one ends the process that does."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None and spec.submodule_search_locations is not None
    model = re.compile(r"^class Model\b|^from .* import .*\bModel\b", re.MULTILINE)
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    return sorted((file.stem for file in files if model.search(file.read_text())), key=str.lower)


def try_architecture(architecture: str) -> Row:
    """Serve a tiny model of an architecture.

    Raises:
        AssertionError: The engine's tokens are not those of the plain model.
    """
    from workbench import Engine, EngineConfig, SamplingParams  # isort: skip  # before mlx: it chooses the BLAS

    import numpy as np
    from tiny_configurations import NOT_TRIED
    from tiny_models import VOCAB_SIZE, tiny_loaded_model

    from workbench.models.preflight import UnsupportedModelError

    if architecture in NOT_TRIED:
        return Row(architecture, "", "not tried", NOT_TRIED[architecture])
    try:
        loaded = tiny_loaded_model(architecture)
    except SystemExit:
        why = "mlx-lm ends the process that imports it, because a package is missing; Workbench raises an error"
        return Row(architecture, "", "refused", why)
    except Exception as problem:
        return Row(architecture, "", "not tried", f"the tiny configuration is wrong: {_one_line(problem)}")
    prompts = [np.random.default_rng(s).integers(1, VOCAB_SIZE, size=n).tolist() for s, n in PROMPTS]
    config = EngineConfig(
        block_size=4, num_blocks=64, max_model_len=64, max_num_batched_tokens=6, enable_prefix_caching=False
    )
    try:
        engine = Engine(loaded, config)
    except UnsupportedModelError as problem:
        return Row(architecture, "", "refused", _one_line(problem))
    with engine:
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        tokens = [list(output.token_ids) for output in engine.run(progress=False)]
        result = engine.runner.preflight
    expected = [_plain_tokens(loaded.model, prompt) for prompt in prompts]
    assert tokens == expected, f"{architecture}: the engine's tokens are {tokens}, the model's {expected}"
    return Row(architecture, ", ".join(_keeps(result)), result.mode if result.layers else "state", result.reason)


def _keeps(result: PreflightResult) -> Iterator[str]:
    """The kinds of caches of a served model's layers."""
    if any(window < 0 for window in result.windows):
        yield "all tokens"
    if any(window > 0 for window in result.windows):
        yield "a window"
    if result.states:
        yield "a state"


def _plain_tokens(model: nn.Module, prompt: list[int]) -> list[int]:
    """Greedy tokens of a model with mlx-lm's own caches, each from a pass over the whole sequence.

    In one pass the windows of all tokens are equal. Those of mlx-lm's PLaMo 3 are a token longer in a pass than in
    decodes with its cache.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(int(mx.argmax(model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1])))
    return tokens[len(prompt) :]


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]


def _serve(pipe: Connection) -> None:
    """Answer names of architectures with their rows, or with the text of a problem, until there are no more."""
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]
    from workbench.base.device import DEVICE_VARIABLE, choose_device  # isort: skip  # before mlx: workbench chooses the BLAS

    import mlx.core as mx

    os.environ.setdefault(DEVICE_VARIABLE, "cpu")  # the table is the same on a Mac
    choose_device()
    mx.disable_compile()  # compiling fused kernels with a C++ compiler takes longer than everything else
    logging.disable(logging.CRITICAL)
    while (architecture := pipe.recv()) is not None:
        try:
            pipe.send(try_architecture(architecture))
        except Exception as problem:
            pipe.send(f"{architecture}: {type(problem).__name__}: {problem}")


def try_all(
    names: Iterable[str], time_limit_s: float = TIME_LIMIT_S, serve: Callable[[Connection], None] = _serve
) -> Iterator[Row]:
    """The rows of architectures, tried in another process.

    Args:
        names: Architectures.
        time_limit_s: Wall time for each, after which it counts as not tried.
        serve: Function of the other process.

    Raises:
        RuntimeError: The engine failed where it should have refused, or computed other tokens than the model.
    """
    process = pipe = None
    try:
        for name in names:
            if process is None:
                pipe, other = multiprocessing.Pipe()
                process = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
                process.start()
                other.close()
            assert pipe is not None
            pipe.send(name)
            try:
                answer = pipe.recv() if pipe.poll(time_limit_s) else None
            except EOFError:
                process.join()
                answer = Row(name, "", "not tried", f"mlx-lm's own code ends the process (status {process.exitcode})")
                process = None
            if answer is None:
                process.kill()
                process.join()
                answer = Row(name, "", "not tried", f"no answer in {time_limit_s:g} s")
                process = None
            if isinstance(answer, str):
                raise RuntimeError(answer)
            yield answer
    finally:
        if process is not None:
            with suppress(OSError):  # it may have ended
                pipe.send(None)
            process.join(STOP_S)
            process.kill()


def table(rows: Iterable[Row]) -> str:
    """The text between the markers."""
    rows = list(rows)
    counts = {kind: sum(row.served == kind for row in rows) for kind in SERVED}
    served = sum(counts[kind] for kind in ("kernel", "gather", "state"))
    version = importlib.metadata.version("mlx-lm")
    lines = [
        f"Of the {len(rows)} architectures of mlx-lm {version}, {served} are served and {counts['refused']} refused;"
        f" {counts['not tried']} could not be tried.",
        "",
        "| architecture | layers keep | served with | reason |",
        "|---|---|---|---|",
        *map(str, rows),
    ]
    return "\n".join(lines) + "\n"


def rows_of(page: str) -> dict[str, Row]:
    """The rows of a page, by architecture."""
    text = page.split(BEGIN)[1].split(END)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cell[0]: Row(*cell) for cell in cells[2:]}


def main() -> int:
    """Write the page or check it, or print the rows of the given architectures."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if names:
        for row in try_all(names):
            print(row, flush=True)
        return 0
    rows = []
    for row in try_all(architectures()):
        print(row, file=sys.stderr)
        rows.append(row)
    before, rest = PAGE.read_text().split(BEGIN)
    text = before + BEGIN + "\n" + table(rows) + "\n" + END + rest.split(END)[1]
    return write_or_check(__doc__.splitlines()[0], [(PAGE, text)], "mlx-lm")


if __name__ == "__main__":
    raise SystemExit(main())

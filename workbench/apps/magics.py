"""``%load_ext workbench``: magics over the public functions, for a notebook.

``%%ask`` asks an engine, ``%step`` takes steps, ``%watch`` shows a view and ``%explain`` says where a request's time
went. Each of them uses the engine of the notebook if there is one; ``-e NAME`` names another, or a trace. ``%%metal``
runs a Metal kernel, if its extra is installed.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from workbench.engine.engine import Engine
from workbench.kernels.msl.compiler import why_unavailable
from workbench.trace.trace import Trace
from workbench.viz.panel_names import PanelName


def load(shell: Any) -> None:
    """Register the magics with an IPython shell."""
    shell.register_magics(WorkbenchMagics)
    matchers = shell.Completer.custom_matchers
    if not any(getattr(matcher, "__name__", "") == "arguments_of_magic" for matcher in matchers):
        matchers.append(_matcher(shell))
    if not why_unavailable():
        shell.register_magics(MetalMagics)


_IN_LINE = re.compile(r"^\s*(%%ask|%step|%watch|%explain)\s+((?:.*\s)?)(\S*)$")
"""A magic, its earlier arguments, and the beginning of one."""


def _matcher(shell: Any) -> Any:
    """The matcher that completes the arguments of our magics, and lets no other one add names of Python."""

    @context_matcher()
    def arguments_of_magic(context: Any) -> dict[str, Any]:
        if not (found := _IN_LINE.search(context.text_until_cursor)):
            return {"completions": []}
        magic, before, begin = found.groups()
        options = _options(magic) if begin.startswith("-") else []
        texts = [text for text in options or _arguments(shell, magic, before.split()) if text.startswith(begin)]
        completions = list(map(SimpleCompletion, texts))
        return {"completions": completions, "matched_fragment": begin, "suppress": bool(texts)}

    return arguments_of_magic


def _options(magic: str) -> list[str]:
    """The options of a magic."""
    return list(getattr(WorkbenchMagics, magic.lstrip("%")).parser._option_string_actions)


def _arguments(shell: Any, magic: str, before: list[str]) -> list[str]:
    """Values of a magic's argument: a variable after ``-e``, a request of ``%explain``, a panel of ``%watch``."""
    if before and before[-1] in ("-e", "--engine"):
        kinds = Engine if magic in ("%%ask", "%step") else (Engine, Trace)
        return [name for name, value in shell.user_ns.items() if isinstance(value, kinds) and name[0] != "_"]
    if magic == "%watch":
        return list(get_args(PanelName))
    if magic != "%explain":
        return []
    named = [before[index + 1] for index, word in enumerate(before[:-1]) if word in ("-e", "--engine")]
    try:
        source = _source(shell, named[0] if named else None)
    except UsageError:
        return []
    return list(getattr(source, "trace", source).requests)


@magics_class
class WorkbenchMagics(Magics):
    """The magics; each is a line over a method of the engine or trace that the notebook has."""

    @magic_arguments()
    @argument("-e", "--engine", help="variable that holds the engine; by default the only open one")
    @argument("-n", "--max-tokens", type=int, default=256, help="maximum number of tokens of the answer (256)")
    @cell_magic
    def ask(self, line: str, cell: str) -> Any:
        """Ask the model: the answer appears word by word, then its way through the engine."""
        given = parse_argstring(self.ask, line)
        return _source(self.shell, given.engine, steps=True).ask(cell.strip(), max_tokens=given.max_tokens)

    @magic_arguments()
    @argument("-e", "--engine", help="variable that holds the engine; by default the only open one")
    @argument("count", type=int, nargs="?", default=1, help="number of steps to take (1)")
    @line_magic
    def step(self, line: str) -> Any:
        """Take steps; the last one is shown."""
        given = parse_argstring(self.step, line)
        if given.count < 1:
            raise UsageError(f"count must be 1 or more, got {given.count}: the number of steps to take")
        engine, record = _source(self.shell, given.engine, steps=True), None
        for _ in range(given.count):
            if (taken := engine.step()) is None:
                break
            record = taken
        return record

    @magic_arguments()
    @argument("-e", "--engine", help="variable that holds the engine or the trace; by default the only one")
    @argument("--height", type=int, help="height of the view in pixels; it scrolls within")
    @argument("panels", nargs="*", help="panels to show, such as chunks or kv_pool; by default all")
    @line_magic
    def watch(self, line: str) -> Any:
        """Show a live view."""
        given = parse_argstring(self.watch, line)
        return _source(self.shell, given.engine).watch(panels=tuple(given.panels), height=given.height)

    @magic_arguments()
    @argument("-e", "--engine", help="variable that holds the engine or the trace; by default the only one")
    @argument("request", help="id of the request, or a beginning of it")
    @line_magic
    def explain(self, line: str) -> Any:
        """Say where the time of a request went."""
        given = parse_argstring(self.explain, line)
        source = _source(self.shell, given.engine)
        return getattr(source, "trace", source).explain(given.request)


def _source(shell: Any, name: str | None, *, steps: bool = False) -> Any:
    """The engine or trace to use.

    Args:
        shell: The shell whose variables are searched.
        name: Its variable; None for the only one of the notebook, an engine before a trace.
        steps: It must be an engine.

    Raises:
        UsageError: There is none, or there are several.
    """
    kinds = (Engine,) if steps else (Engine, Trace)
    wanted = "an engine" if steps else "an engine or a trace"
    variables = shell.user_ns
    if name is not None:
        if not isinstance(found := variables.get(name), kinds):
            raise UsageError(f"-e {name}: there is no variable of this name that holds {wanted}")
        return found
    for kind in kinds:
        # Names that begin with _ are IPython's: outputs of cells.
        values = [(name, value) for name, value in variables.items() if not name.startswith("_")]
        usable = [pair for pair in values if isinstance(pair[1], kind) and not getattr(pair[1], "closed", False)]
        found = {id(value): (name, value) for name, value in usable}
        if len(found) > 1:
            names = ", ".join(name for name, _ in found.values())
            raise UsageError(f"choose one with -e NAME: {names}")
        if found:
            return next(iter(found.values()))[1]
    raise UsageError(f"this notebook has no variable that holds {wanted}: engine = workbench.Engine('smollm2')")


@magics_class
class MetalMagics(Magics):
    """The magic of kernels, which needs a compiler: the extra ``msl``, or clang."""

    @magic_arguments()
    @argument("outputs", nargs="+", help="NAME=DTYPE[SHAPE] of each output, such as y=float32[64]")
    @argument("-i", "--inputs", nargs="+", default=[], help="variables, or NAME=DTYPE[SHAPE] for random numbers")
    @argument("-g", "--grid", required=True, help="number of threads, such as 64 or 64,2,1")
    @argument("-t", "--threadgroup", required=True, help="threads per threadgroup")
    @argument("--template", nargs="+", default=[], help="NAME=VALUE: dtypes, integers, true or false")
    @argument("--record", type=int, default=1, help="number of threadgroups to record (1)")
    @argument("--watch", nargs="+", default=[], help="variables whose values are recorded after every assignment")
    @cell_magic
    def metal(self, line: str, cell: str) -> Any:
        """Run the body of a Metal kernel here with every check, and on the GPU too if there is one.

        The outputs become variables of the notebook. The result has the recording: ``_.run.watch()``.
        """
        from workbench.apps.metal_cell import run_cell
        from workbench.kernels.msl import MslCompileError
        from workbench.kernels.msl.diagnostics import with_carets

        given = parse_argstring(self.metal, line)
        assert self.shell is not None
        try:
            found = run_cell(
                cell,
                self.shell.user_ns,
                inputs=given.inputs,
                outputs=given.outputs,
                grid=given.grid,
                threadgroup=given.threadgroup,
                template=given.template,
                threadgroups=given.record,
                watch=given.watch,
            )
        except MslCompileError as problem:
            raise UsageError(with_carets(str(problem))) from None
        except ValueError as problem:
            raise UsageError(str(problem)) from None
        self.shell.user_ns.update(found.outputs)
        return found

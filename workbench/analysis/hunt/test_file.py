"""Writes ``test_finding.py``: a test that fails with nothing but the scheduler under test and pytest installed.

It is made of the files of this room that import nothing of Workbench, written out: the driver, the check of the law,
and vLLM's adapter.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from types import ModuleType
from typing import Any

from workbench.analysis.hunt import drive, vllm_parts, vllm_scheduler, vllm_waits
from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.plain_laws import CHECKS, Check
from workbench.analysis.hunt.target import MAX_STEPS, Refused, Target

_TEST = '''"""{scheduler}: {message}.

The law of {law} is broken: {protects}
This file needs pytest and the scheduler, and no model: tokens are made up.
"""

{imports}

WORKLOAD = json.loads("""
{workload}""")


def test_finding() -> None:
    run = Run({make}, WORKLOAD, {check}())
    try:
        end = run.drive({max_steps})
    except ValueError:
        if not run.in_add:
            raise
        return  # the scheduler refuses a request now
    assert end == "done", f"{{list(run.requests)}} never end"
'''

_OURS = '''"""{scheduler}: {message}."""

import json

from workbench.analysis.hunt.target import find_target

WORKLOAD = json.loads("""
{workload}""")


def test_finding() -> None:
    assert find_target({name!r}{policy}).run(WORKLOAD) is None
'''


def test_text(target: Target, facts: dict[str, Any], workload: str) -> str:
    """The text of the test.

    Args:
        target: The scheduler under test.
        facts: ``law``, ``message`` and ``protects``.
        workload: The workload as JSON.
    """
    facts = {**facts, "scheduler": f"{target.name} {target.version}".strip(), "workload": workload}
    law = str(facts["law"])
    if target.is_ours or not fails_plainly(target, law, json.loads(workload)):
        policy = f", {target.policy!r}" if target.policy else ""
        return _OURS.format(**facts, name=target.name, policy=policy)
    check = CHECKS.get(law, Check)
    kind, _, chosen = target.name.partition(":")
    parts = [_body(drive), inspect.getsource(Check), *([inspect.getsource(check)] if check is not Check else [])]
    lines = _imports(drive)
    if kind != "vllm":
        module = importlib.import_module(kind)
        if "workbench.analysis.hunt" in inspect.getsource(module):  # it is an adapter
            parts.append(_body(module))
            lines |= _imports(module)
        else:
            lines.add(f"from {kind} import {chosen}")
        make = f'{chosen}(WORKLOAD["config"])'
    else:
        for module in (vllm_parts, vllm_waits, vllm_scheduler):
            parts.append(_body(module))
            lines |= _imports(module)
        home, _, name = chosen.partition(":")
        lines |= {f"from {home} import {name}"} if name else set()
        make = f'VllmScheduler(WORKLOAD["config"]{", " * bool(name)}{name})'
    lines.add("import json")
    facts |= {"make": make, "check": check.__name__, "max_steps": MAX_STEPS, "imports": "\n".join(sorted(lines))}
    head = "from __future__ import annotations"
    text = _TEST.format(**facts).replace(facts["imports"], f"{head}\n\n{facts['imports']}", 1)
    return text + "\n\n" + "\n\n".join(part.strip() + "\n" for part in parts)


def fails_plainly(target: Target, law: str, workload: dict[str, Any]) -> bool:
    """Whether the plain check of a law, which the generated test has, fails on a workload."""
    try:
        scheduler = target.make(workload["config"])
    except Exception as problem:
        raise Refused(str(problem)) from None
    try:
        return Run(scheduler, workload, CHECKS.get(law, Check)()).drive(MAX_STEPS) != "done"
    except Exception:
        return True
    finally:
        if hasattr(scheduler, "close"):
            scheduler.close()


def _imports(module: ModuleType) -> set[str]:
    found = re.findall(r"^(?:import|from) .*$", inspect.getsource(module), re.M)
    return {line for line in found if "workbench" not in line and "__future__" not in line}


def _body(module: ModuleType) -> str:
    """A module's text behind its imports."""
    text = inspect.getsource(module)
    last = [match.end() for match in re.finditer(r"^(?:import|from) .*$", text, re.M)][-1]
    return text[last:]

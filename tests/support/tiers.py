"""The share of the tests that runs: ``pytest --tier check``, ``--tier test`` (the default) or ``--tier all``.

``check`` runs the files of `CHECK`: quick ones that find most faults. ``test`` runs tests of every kind. Both leave out
repeats: the cases of a function that its marker does not keep, and random inputs beyond a part of them (`examples`).
``all`` leaves out nothing. A test named on the command line (``file.py::test``) runs with all its cases.

The inputs that Hypothesis draws are new ones in each run of ``all``. The other tiers draw the same ones each time, so
that a push fails for what it changes, and a failure comes back until it is mended.

The marker is one of

- ``@pytest.mark.repeats(step=7)``: every seventh case,
- ``@pytest.mark.repeats(every="value")``: enough cases that every value of every parameter occurs,
- ``@pytest.mark.repeats(every="pair")``: enough cases that every pair of values of two parameters occurs,
- ``@pytest.mark.repeats(of="test_name")``: none, because that test, here or elsewhere, has a case of the same kind.

Every notebook runs in ``test``: each is the only case of its lesson.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

TIERS = ("check", "test", "all")

CHECK = (
    "tests/test_architecture.py",
    "tests/test_config.py",
    "tests/scheduler/",
    "tests/laws/test_laws.py",
    "tests/trace/test_records.py",
    "tests/trace/test_trace_file.py",
    "tests/readings/",
    "tests/costs/",
    "tests/simulation/test_simulate.py",
    "tests/attention/test_attention.py",
    "tests/attention/test_attention_validate.py",
    "tests/attention/test_work_list.py",
    "tests/attention/metal/test_metal_kernel_triangle.py",
    "tests/attention/metal/test_tile_shape.py",
    "tests/engine/test_packed_batch.py",
    "tests/engine/test_sampler.py",
    "tests/viz/test_viz_layout.py",
    "tests/viz/test_viz_packet.py",
    "tests/repository/test_workflows.py",
)
"""Files and folders of the tier ``check``. CONTRIBUTING.md says what they find."""

CHECK_LEAVES_OUT = (
    "tests/costs/test_cost_model.py",
    "tests/costs/test_drift.py",
    "tests/costs/test_stalls.py",
    "tests/costs/test_step_noise.py",
    "tests/scheduler/test_eviction.py",
    "tests/scheduler/test_fairness.py",
    "tests/scheduler/test_second_tier.py",
)
"""Files in these folders that are not in the tier: they take two fifths of its time, and each tests one feature."""

_tier = "test"


def examples(number: int, part: int = 4) -> int:
    """A test's number of random inputs in this tier: one of ``part`` of them and at least 10, or all of ``number``."""
    return number if _tier == "all" else min(number, max(10, number // part))


# -- the choice of cases -------------------------------------------------------------------------------------------


def covering(rows: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Indices of rows in which every value (strength 1) or pair of values of two columns (2) of ``rows`` occurs.

    The row with the most values or pairs that are still missing is taken next, of several the one whose values have
    been taken least often, so that each backend meets several models.
    """
    size = min(strength, len(rows[0]))
    parts = [
        {(columns, tuple(row[c] for c in columns)) for columns in combinations(range(len(row)), size)} for row in rows
    ]
    missing, chosen, taken = set().union(*parts), [], Counter[tuple[int, Hashable]]()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda index: (len(parts[index] & missing), -sum(taken[value] for value in enumerate(rows[index]))),
        )
        taken.update(enumerate(rows[best]))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def kept(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of one function that its marker keeps."""
    marker = items[0].get_closest_marker("repeats")
    if marker is None:
        return items
    if "of" in marker.kwargs:
        return []
    if "step" in marker.kwargs:
        return items[:: marker.kwargs["step"]]
    # One id per `parametrize`. pytest has no public name for them; their sum, item.callspec.id, cannot be taken apart.
    rows = [tuple(item.callspec._idlist) for item in items]  # type: ignore[attr-defined]
    return [items[index] for index in covering(rows, {"value": 1, "pair": 2}[marker.kwargs["every"]])]


# -- pytest --------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="test", help="how much runs: tests/support/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    global _tier
    _tier = config.getoption("tier")
    if find_spec("hypothesis") is not None:  # an environment of vLLM has none
        from hypothesis import settings

        settings.register_profile("tier", deadline=None, derandomize=_tier != "all")
        settings.load_profile("tier")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the tier ``check``, do not even import the other files."""
    if _tier != "check" or collection_path.is_dir():
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return not path.startswith(CHECK) or path.startswith(CHECK_LEAVES_OUT) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off what stays until the end: modules, tests and their cases.

    Each process has a million of these objects. Walking over them takes 2 s of a collection, and then 0.4 s whenever
    a test calls `gc.collect()` or the collector starts a full pass.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: defaultdict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[(item.parent, getattr(item, "originalname", item.name))].append(item)
    named = {argument for argument in config.args if "::" in argument or argument.endswith(".ipynb")}
    stay = [item for cases in functions.values() for item in (cases if named or _tier == "all" else kept(cases))]
    total, left = len(items), set(map(id, stay))
    if len(left) < total:
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = [item for item in items if id(item) in left]
    line = f"tier {_tier}: {len(items):,} of {total:,} cases"
    config.stash[LINE] = line + ("; make test-all runs all" if len(items) < total or _tier == "check" else "")
    if hasattr(config, "workeroutput"):
        config.workeroutput["tier"] = config.stash[LINE]


LINE = pytest.StashKey[str]()


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return config.stash.get(LINE, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended: it knows what the one that reports has not collected."""
    node.config.stash[LINE] = getattr(node, "workeroutput", {}).get("tier", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and config.stash.get(LINE, ""):
        terminalreporter.write_line(config.stash[LINE])

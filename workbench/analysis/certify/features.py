"""The features of a certificate, and workloads that have one of them each, drawn when it is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.analysis.certify.neutral import judge, neutral_workload, steps_of
from workbench.analysis.hunt.search import shape
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload
from workbench.trace import Trace

MOST_TRIES = 4000
"""Random workloads of which one must have the feature."""

MOST_STEPS = 200
"""Steps of the longest workload."""

Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Feature:
    """A row of the certificate.

    Attributes:
        name: Its name.
        draws: Features that its workloads may use, of `workbench.analysis.hunt.workloads.FEATURES`.
        needs: Features that they must use, of `workbench.analysis.hunt.search.shape`.
        happens: Tells whether the judge's schedule shows it.
        preempts: Requests are preempted, or none are; None if that is left open.
        settings: Its workloads have at least one of these settings; empty for no matter which.
    """

    name: str
    draws: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    happens: Callable[[Steps], bool] = lambda steps: True
    preempts: bool | None = False
    settings: frozenset[str] = frozenset()


def _hits(steps: Steps) -> bool:
    return any(tokens for step in steps for tokens in step["hits"].values())


def _drafts(steps: Steps) -> bool:
    return any(chunk["num_drafts"] for step in steps for chunk in step["chunks"])


FEATURES = (
    Feature("chunked prefill"),
    Feature("chunk caps", ("caps",), frozenset({"caps"})),
    Feature("preemption", preempts=True),
    Feature(
        "admission reserve",
        ("pools",),
        preempts=None,
        settings=frozenset({"watermark", "scheduler_reserve_full_isl"}),
    ),
    Feature("prefix caching", ("caching",), frozenset({"caching"}), _hits),
    Feature("prefix caching with preemption", ("caching",), frozenset({"caching"}), _hits, preempts=True),
    Feature("priority", ("priority",), frozenset({"priority"}), preempts=None),
    Feature("asynchronous steps", ("async",), frozenset({"async"})),
    Feature("asynchronous steps with preemption", ("async",), frozenset({"async"}), preempts=True),
    Feature("drafts", ("drafts",), frozenset({"drafts"}), _drafts),
    Feature("drafts with prefix caching", ("drafts", "caching"), frozenset({"drafts", "caching"}), _drafts, None),
    Feature("drafts in asynchronous steps", ("drafts", "async"), frozenset({"drafts", "async"}), _drafts),
    Feature("sliding windows", ("groups",), frozenset({"windows"}), preempts=None),
    Feature("windows with prefix caching", ("groups", "caching"), frozenset({"windows", "caching"}), _hits, None),
    Feature("recurrent layers", ("groups", "states"), frozenset({"states"}), preempts=None),
    Feature(
        "recurrent layers with prefix caching",
        ("groups", "states", "caching"),
        frozenset({"states", "caching"}),
        _hits,
        None,
    ),
    Feature("adapters", ("adapters",), frozenset({"adapters"})),
    Feature("grammars", ("grammars",), frozenset({"grammars"})),
    Feature(
        "all together",
        ("caching", "priority", "drafts", "async", "groups", "states", "caps", "pools", "grammars"),
        preempts=None,
    ),
)
"""Every feature, the ones that build on others after them."""


def draw(feature: Feature, count: int, rng: random.Random) -> Iterator[tuple[dict[str, Any], Trace]]:
    """Draw workloads that have a feature.

    Args:
        feature: The feature.
        count: Number of workloads.
        rng: Draws them.

    Yields:
        The neutral workload, and the run of the judge.
    """
    drawn = 0
    for _ in range(MOST_TRIES):
        if drawn == count:
            return
        workload = make_workload(rng.randbytes(WORKLOAD_BYTES), feature.draws)
        if not feature.needs <= shape(workload) or (
            feature.settings and not feature.settings & set(workload["config"])
        ):
            continue
        made = neutral_workload(f"{feature.name} {drawn}", workload)
        try:
            trace = judge(made)
        except (ValueError, RuntimeError):
            continue  # nobody can serve it, or vLLM would die
        steps = steps_of(trace)
        preempts = any(step["preempted"] for step in steps)
        is_fit = trace.end == "done" and len(steps) <= MOST_STEPS and feature.happens(steps)
        if is_fit and feature.preempts in (None, preempts):
            drawn += 1
            yield made, trace

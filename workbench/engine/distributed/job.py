"""Run a command on all ranks of a job, or in a single process."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.base.compatibility import RANKS
from workbench.config import EngineConfig
from workbench.engine.distributed.group import LEADER, is_launched, join_group, leader_host
from workbench.engine.distributed.link import Link, open_link
from workbench.engine.distributed.ranks import LeadingRunner, follow
from workbench.engine.engine import Engine
from workbench.engine.model_runner import ModelRunner
from workbench.models.load import LoadedModel, load_model


class ShardedEngine(Engine):
    """The engine on rank 0 of a model that all ranks share; only its runner differs from an engine in one process.

    Args:
        model: This rank's part of the model.
        link: Link to the other ranks, each of which runs `follow`.
        config: See `Engine`.
        **options: See `Engine`.
    """

    _situations = (RANKS,)

    def __init__(self, model: LoadedModel, link: Link, config: EngineConfig | None = None, **options: Any) -> None:
        self._link = link
        super().__init__(model, config, **options)

    def _make_runner(self) -> ModelRunner:
        return LeadingRunner(self.model, self.config, self._link)


MakeEngine = Callable[..., Engine]
"""``make_engine(config, **options)``: an engine for the loaded model, with the options of `Engine`."""


def run_job(model: str, lead: Callable[[LoadedModel, MakeEngine], int], **loading: Any) -> int:
    """Load a model and run a command with it; if ``mlx.launch`` started several ranks, they share the model.

    Args:
        model: Name or path of a model, see `load_model`.
        lead: The command. It is called with the loaded model and a function that makes engines, on rank 0 only; the
            other ranks follow its engines until it returns.
        **loading: Options of `load_model`.

    Returns:
        The exit status: the result of ``lead``, or 0 on other ranks.

    Raises:
        ValueError: The ranks cannot share the model.
        OSError: A rank could not be reached.
    """
    if not is_launched():
        loaded = load_model(model, **loading)
        return lead(loaded, partial(Engine, loaded))
    group = join_group()
    link = open_link(group, leader_host())
    try:
        if group.rank() == LEADER:
            loaded = load_model(model, group=group, **loading)
            return lead(loaded, partial(ShardedEngine, loaded, link))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every rank, but rank 0 ends the job
        follow(link, partial(load_model, model, group=group, **loading))
        return 0
    finally:
        link.close()
        # The process ends now. Python's last garbage collection takes seconds when ranks share the cores.
        gc.freeze()


def run_engines(model: str, lead: Callable[[MakeEngine], int]) -> int:
    """`run_job` for a command that only makes engines: in one process they load the model, and need not be compiled."""
    if not is_launched():
        return lead(partial(Engine, model))
    return run_job(model, lambda _, make_engine: lead(make_engine))

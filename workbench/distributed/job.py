"""A command on all ranks of a job, or in the one process that there is."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.distributed.group import LEADER, is_launched, join_group, leader_host
from workbench.distributed.link import Link, open_link
from workbench.distributed.ranks import LeadingRunner, follow
from workbench.engine.config import EngineConfig
from workbench.engine.engine import Engine
from workbench.engine.model_runner import ModelRunner
from workbench.models.load import LoadedModel, load_model


class ShardedEngine(Engine):
    """The engine on rank 0 of a model that all ranks share; everything but its runner is as in one process.

    Args:
        model: This rank's part of the model.
        link: To the other ranks, each of which is in `follow`.
        config: See `Engine`.
        **options: See `Engine`.
    """

    def __init__(self, model: LoadedModel, link: Link, config: EngineConfig | None = None, **options: Any) -> None:
        self._link = link
        super().__init__(model, config, **options)

    def _make_runner(self) -> ModelRunner:
        return LeadingRunner(self.model, self.config, self._link)


MakeEngine = Callable[..., Engine]


def run_job(model: str, lead: Callable[[LoadedModel, MakeEngine], int]) -> int:
    """Load a model and run a command over it; split over the ranks where ``mlx.launch`` started several.

    Args:
        model: What `load_model` takes.
        lead: The command: called with the loaded model and with ``make_engine(config, **options)``. It runs on rank 0
            alone; the other ranks follow its engines until it returns.

    Returns:
        The exit status: what ``lead`` returned, 0 on other ranks.

    Raises:
        ValueError: The ranks cannot share the model.
        OSError: A rank could not be reached.
    """
    if not is_launched():
        loaded = load_model(model)
        return lead(loaded, partial(Engine, loaded))
    group = join_group()
    link = open_link(group, leader_host())
    try:
        if group.rank() == LEADER:
            loaded = load_model(model, group=group)
            return lead(loaded, partial(ShardedEngine, loaded, link))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every rank; rank 0 says when the job is done
        follow(link, partial(load_model, model, group=group))
        return 0
    finally:
        link.close()
        # The process ends now. Python's last look through all objects takes seconds where ranks share the cores.
        gc.freeze()

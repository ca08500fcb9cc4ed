"""The part of speculative decoding in every step: drafts are verified, and proposed for the next step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from workbench.engine.sampler import Sampler
from workbench.engine.speculation.speculator import Speculator
from workbench.engine.stages import Computed, Stage, StepPart
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.scheduler import Scheduler


class Speculation(StepPart):
    """Verifies drafts instead of sampling alone, and hands the scheduler those of the next step.

    Args:
        speculator: Makes drafts and verifies them.
        sampler: Chooses tokens.
        scheduler: Is given the drafts, unless its steps are asynchronous.
    """

    def __init__(self, speculator: Speculator, sampler: Sampler, scheduler: Scheduler) -> None:
        self._speculator, self._sampler, self._scheduler = speculator, sampler, scheduler

    def stages(self, others: Mapping[str, Stage]) -> Mapping[str, Stage]:
        """Verify in the place of sampling, and draft."""
        return {"sample": self._verify, "draft": self._propose}

    def _verify(self, computed: Computed) -> tuple[str, Any]:
        computed.sampled = self._speculator.sample(self._sampler, computed.logits, computed.batch)
        computed.lap("sample")
        return "sample", list(chain.from_iterable(computed.sampled))

    def _propose(self, computed: Computed) -> tuple[str, Any]:
        computed.drafts = self._speculator.propose(computed.batch, computed.packed, computed.sampled)
        computed.lap("draft")
        return "draft", computed.drafts

    def updated(self, computed: Computed) -> None:
        """Let the next step verify the drafts."""
        if not self._scheduler.config.async_scheduling:
            drafts = {name: self._allowed(name, drafts.token_ids) for name, drafts in computed.drafts.items()}
            self._scheduler.set_drafts(drafts)

    def _allowed(self, request_id: str, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The drafts of a request up to the first that its grammar does not allow."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.grammar is None:
            return drafts
        from workbench.engine.grammar import allowed_drafts

        return allowed_drafts(request, drafts)

    def ending(self, iteration: ScheduledBatch) -> None:
        """Forget what is kept of requests that have ended."""
        for request_id in (*iteration.finish_reasons, *iteration.aborted):
            self._speculator.forget(request_id)

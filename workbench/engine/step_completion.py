"""What becomes of a scheduled batch: its tokens, the requests that end with it, and the record of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from types import MappingProxyType

from workbench.engine.config import EngineConfig
from workbench.engine.policy import SchedulingPolicy
from workbench.engine.request import FinishReason
from workbench.engine.scheduled_batch import ScheduledBatch
from workbench.engine.service_order import ServiceOrder
from workbench.trace.records import Chunk, KernelLaunch, StepRecord


class StepCompletion(ServiceOrder):
    """The half of the scheduler that comes after the forward pass.

    Args:
        config: Limits and policies.
        policy: Decides order and victims instead of vLLM's rules; None for those.
    """

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy | None) -> None:
        super().__init__(config, policy)
        self._in_flight: ScheduledBatch | None = None

    def update(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[int | None],
        *,
        texts: Sequence[str] = (),
        finish: Mapping[str, FinishReason] = MappingProxyType({}),
        timings: dict[str, float] | None = None,
        kernel: KernelLaunch | None = None,
    ) -> StepRecord:
        """Append the sampled tokens, end the requests that are done, and make the record of the step.

        Args:
            batch: What the last ``schedule()`` returned.
            sampled: For each chunk its token; None where the chunk does not sample.
            texts: For each chunk the text that its token added to the output.
            finish: Requests of the batch that end for a reason of the caller's: "stop" after a stop string, or
                "error", which drops the token.
            timings: Seconds per phase.
            kernel: What the attention kernel was handed.

        Raises:
            ValueError: Not the batch under way, or tokens that do not fit its chunks; nothing has changed then.
        """
        self._check_update(batch, sampled, texts, finish)
        return self._complete(batch, sampled, texts, finish, timings, kernel)

    def fail(self, batch: ScheduledBatch) -> StepRecord:
        """End every request of a batch whose forward pass raised; all others go on as if it had not happened.

        Their blocks come back, and what they and the batch had published to the prefix cache is withdrawn.

        Raises:
            ValueError: Not the batch under way.
        """
        self._check_in_flight(batch)
        self.kv_cache.withdraw(batch.cached_block_ids)
        batch.cached_block_ids = ()
        errors = {chunk.request.request_id: "error" for chunk in batch.chunks}
        return self._complete(batch, [None] * len(batch.chunks), (), errors, None, None)

    def _complete(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[int | None],
        texts: Sequence[str],
        finish: Mapping[str, FinishReason],
        timings: dict[str, float] | None,
        kernel: KernelLaunch | None,
    ) -> StepRecord:
        chunks: list[Chunk] = []
        finish_reasons: dict[str, str] = {}
        max_model_len = self.max_model_len
        for scheduled, token, text in zip(batch.chunks, sampled, texts or repeat("")):
            request = scheduled.request
            request_id = request.request_id
            reason = finish.get(request_id) if finish else None
            if request.status == "finished":  # aborted while its step was under way
                token, text, reason = None, "", None
            elif reason == "error":  # the token is not to be trusted
                token, text = None, ""
            if token is not None:
                request.token_ids.append(token)
                reason = reason or request.check_stop(token, max_model_len)
            if reason is not None:
                finish_reasons[request_id] = reason
                self._finish(request, reason)
            chunks.append(
                Chunk(
                    request_id,
                    scheduled.start,
                    scheduled.num_tokens,
                    not scheduled.samples,
                    scheduled.arm,
                    token,
                    scheduled.limited_by,
                    scheduled.new_block_ids,
                    scheduled.num_cached_tokens,
                    scheduled.num_recomputed_tokens,
                    text,
                )
            )
        if finish_reasons:
            self._drop_finished()
        self._in_flight = None
        return batch.to_record(
            chunks,
            finish_reasons,
            block_size=self.config.block_size,
            free_blocks_end=self.kv_cache.num_free,
            timings=timings,
            kernel=kernel,
        )

    def _check_in_flight(self, batch: ScheduledBatch) -> None:
        if batch is not self._in_flight:
            raise ValueError(f"batch of step {batch.step} is not under way: give back what schedule() returned, once")

    def _check_update(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[int | None],
        texts: Sequence[str],
        finish: Mapping[str, FinishReason],
    ) -> None:
        self._check_in_flight(batch)
        for name, values in (("sampled", sampled), ("texts", texts)):
            if len(values) != len(batch.chunks) and (name == "sampled" or values):
                raise ValueError(f"{name} has {len(values)} entries, the batch has {len(batch.chunks)} chunks")
        for chunk, token in zip(batch.chunks, sampled):
            if (token is None) is chunk.samples and finish.get(chunk.request.request_id) != "error":
                what = "samples and needs a token" if chunk.samples else "samples nothing and takes no token"
                raise ValueError(f"the chunk of request {chunk.request.request_id!r} {what}, got {token!r}")
        if unknown := set(finish).difference(chunk.request.request_id for chunk in batch.chunks) if finish else ():
            raise ValueError(f"finish names {sorted(unknown)}, which are not in the batch")

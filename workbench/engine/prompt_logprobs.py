"""Log-probabilities of prompt tokens, for `SamplingParams(prompt_logprobs=k)`.

The logits of a row are the prediction of the next token, which a prompt knows already. So every row of a chunk of such
a prompt is projected, and taken out again before the sampler sees the step. A request that asks takes nothing from the
prefix cache, as in vLLM: its rows have to run. Compiled code projects the rows in slices, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.engine.forward.path import SlicedLogits
from workbench.engine.sampler import Logits, top_logprobs
from workbench.engine.stages import Computed, Stage, StepPart
from workbench.scheduler.batch import ScheduledBatch

MAX_LOGITS_BYTES = 2 << 30
"""Maximum size of the logits of a step whose rows cannot be projected in slices."""


class PromptLogprobs(NamedTuple):
    """The findings of a step about tokens of a prompt.

    Attributes:
        first: Index of the first of these tokens in the prompt.
        logprobs: For each {token_id: log-probability} of the most likely tokens and its own, and its own rank: 1 is the
            most likely.
    """

    first: int
    logprobs: Sequence[tuple[dict[int, float], int]]


def take_prompt_logprobs(logits: Logits, batch: ScheduledBatch) -> tuple[Logits, Mapping[str, PromptLogprobs]]:
    """The rows of a step that sample, and by request what the other rows say of its prompt.

    Args:
        logits: All rows: those of a chunk are its last ones, as many as its ``num_logits`` says.
        batch: The step.
    """
    kept: list[np.ndarray] = []
    found: dict[str, PromptLogprobs] = {}
    slices = logits.slices if isinstance(logits, SlicedLogits) else (logits.values,)
    rows = (row for values in slices for row in np.asarray(values))
    for chunk in batch.chunks:
        request, count = chunk.request, chunk.request.sampling.prompt_logprobs or 0
        known, likely = request.token_ids[chunk.start + 1 :], []
        num_sampled = 1 + len(chunk.drafts) if chunk.samples else 0
        for index, row in zip(range(chunk.num_logits), rows):
            if index < chunk.num_prompt_rows:
                token = known[index]
                likely.append((top_logprobs(row, count, token), int(np.count_nonzero(row >= row[token]))))
            if index >= chunk.num_logits - num_sampled:
                kept.append(np.array(row))  # without the slice that it is a part of
        if likely:
            found[request.request_id] = PromptLogprobs(chunk.start + 1, likely)
    values = np.array(kept, np.float32).reshape(len(kept), logits.values.shape[1])
    return Logits.of(mx.array(values)), found


class PromptRows(StepPart):
    """Takes the rows of prompts out of a step's logits.

    Args:
        keep: Keeps what they say, by request.
    """

    def __init__(self, keep: Callable[[Mapping[str, PromptLogprobs]], None]) -> None:
        self._keep = keep

    def stages(self, others: Mapping[str, Stage]) -> Mapping[str, Stage]:
        """Take them out at the end of the forward pass."""
        return {"forward": partial(self._forward, others["forward"])}

    def _forward(self, forward: Stage, computed: Computed) -> tuple[str, Any] | None:
        phase = forward(computed)
        if not any(chunk.num_prompt_rows for chunk in computed.batch.chunks):
            return phase
        computed.logits, computed.prompt_logprobs = take_prompt_logprobs(computed.logits, computed.batch)
        computed.lap("prompt_logprobs")
        return "forward", computed.logits.values

    def took(self, computed: Computed) -> None:
        """Keep what the rows say."""
        if computed.prompt_logprobs:
            self._keep(computed.prompt_logprobs)

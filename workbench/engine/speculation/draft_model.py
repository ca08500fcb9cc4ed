"""A draft model: a smaller model that runs ahead of the large one, over KV blocks of the same table.

As in vLLM, the draft model keeps separate keys and values under the block ids that the scheduler gave to the request.
It runs the same chunks as the large model, prompts included, so its KV is there wherever the large model's is: after a
prefix-cache hit, and after a preemption. KV of a rejected draft is overwritten by the next step, here and there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from workbench.base.field_checks import integer
from workbench.engine.distribution import drawn_from
from workbench.engine.packed_batch import Segment, pack
from workbench.engine.sampler import Logits, Sampler, adjust_logits, random_key
from workbench.engine.speculation.proposer import NO_DRAFTS, ComputedChunk, Drafts, Proposer
from workbench.engine.speculation.verification import Continued, draw_draft, draws_at_random

if TYPE_CHECKING:
    from workbench.config import SamplingParams
    from workbench.engine.model_runner import ModelRunner
    from workbench.models.load import LoadedModel


class DraftModelProposer(Proposer):
    """Proposes the tokens of a smaller model.

    Args:
        runner: Runs the draft model, with a pool of as many blocks as the large model's.
        sampler: The engine's sampler, whose seed keys the draws.
        at_random: Draw drafts from the draft model's distribution for requests that sample (vLLM's
            ``draft_sample_method="probabilistic"``); False takes the most likely token ("greedy").
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, *, at_random: bool) -> None:
        self.runner = runner
        self._sampler = sampler
        self._at_random = at_random

    def propose(self, chunks: Sequence[ComputedChunk]) -> list[Drafts]:
        """See `Proposer.propose`. The first pass computes the step's chunks, each later pass one draft per request."""
        block_size = self.runner.kv_cache.block_size
        drafting = [
            _Drafting(chunk, min(chunk.num_drafts, len(chunk.block_ids) * block_size - chunk.end)) for chunk in chunks
        ]
        # A request that has ended may have no token for its rows.
        active, segments = drafting, [each for one in drafting if (each := one.first_segment()).num_tokens]
        while segments:
            logits, _ = self.runner.forward(pack(segments, block_size))
            active = [one for one in active if one.num_drafts > len(one.token_ids)]
            self._choose(logits, active)
            active = [one for one in active if one.num_drafts > len(one.token_ids)]
            segments = [one.next_segment() for one in active]
        return [one.drafts() for one in drafting]

    def _choose(self, logits: Logits, drafting: Sequence[_Drafting]) -> None:
        """Append one draft to each request; a request whose logits are not numbers gets no more."""
        for row, one in enumerate(drafting):
            params = one.state.sampling
            at_random = self._at_random and draws_at_random(params)
            if logits.best[row] < 0:
                one.num_drafts = len(one.token_ids)
                continue
            if not at_random and not changes_logits(params):
                one.append(logits.best[row])
                continue
            adjusted = adjust_logits(logits.rows[row].astype(np.float64), one.state)
            if not np.isfinite(adjusted.max()):
                one.num_drafts = len(one.token_ids)
            elif at_random:
                distribution = drawn_from(adjusted, params)
                distribution /= distribution.sum()
                position = len(one.state.token_ids)
                one.append(draw_draft(distribution, random_key(self._sampler.seed, one.state), position), distribution)
            else:
                one.append(int(adjusted.argmax()))

    def close(self) -> None:
        """Leave the draft model as it was before."""
        self.runner.close()


class _Drafting:
    """A request for which drafts are being made.

    Attributes:
        state: The request, with its drafts so far.
        num_drafts: Number of drafts to make.
        token_ids: The drafts so far.
    """

    def __init__(self, chunk: ComputedChunk, num_drafts: int) -> None:
        self.chunk = chunk
        self.num_drafts = num_drafts
        self.state = Continued(chunk.sequence)
        self.token_ids: list[int] = []
        self._distributions: list[np.ndarray] = []

    def first_segment(self) -> Segment:
        """The step's chunk, and the token that the step sampled if drafts are wanted."""
        chunk = self.chunk
        drafts = self.num_drafts > 0
        tokens = chunk.sequence.token_ids[chunk.start : chunk.end + drafts]
        return Segment(chunk.block_ids, chunk.start, len(tokens), tokens, drafts, chunk.sequence.request_id)

    def next_segment(self) -> Segment:
        """The latest draft."""
        position = self.chunk.end + len(self.token_ids)
        return Segment(self.chunk.block_ids, position, 1, self.token_ids[-1:], True, self.state.request_id)

    def append(self, token: int, distribution: np.ndarray | None = None) -> None:
        """Append a draft and the distribution that it was drawn from."""
        self.token_ids.append(token)
        self.state.token_ids.append(token)
        if distribution is not None:
            self._distributions.append(distribution)

    def drafts(self) -> Drafts:
        """All drafts."""
        if not self.token_ids:
            return NO_DRAFTS
        return Drafts(tuple(self.token_ids), np.array(self._distributions) if self._distributions else None)


def changes_logits(params: SamplingParams) -> bool:
    """Whether biases or penalties change the model's logits."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def first_layers(model: LoadedModel, num_layers: int) -> LoadedModel:
    """The same model with its first layers only; the weights are shared.

    Args:
        model: The whole model.
        num_layers: Number of layers to keep, less than it has.

    Raises:
        ValueError: The model has no more layers than that, or none that can be found.
    """
    whole = model.model
    layers = getattr(whole, "layers", None)
    owner = next((path for path, module in whole.named_modules() if module.get("layers") is layers), None)
    if not isinstance(layers, list) or owner is None:
        raise ValueError(f"the layers of {model.name!r} cannot be told apart: use another model as draft_model")
    integer('speculative["num_layers"]', num_layers, 1, len(layers) - 1, f" ({model.name!r} has {len(layers)} layers)")
    short = _copied(whole, [name for name in owner.split(".") if name])
    reduce(getattr, [name for name in owner.split(".") if name], short).layers = layers[:num_layers]
    num_parameters = sum(weight.size for weight in dict(tree_flatten(short.parameters())).values())
    return replace(model, model=short, name=f"{model.name}, {num_layers} layers", num_parameters=num_parameters)


def _copied(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """A copy of a module and of the submodules along a path; everything else is shared."""
    copied = copy.copy(module)
    if path:
        setattr(copied, path[0], _copied(getattr(module, path[0]), path[1:]))
    return copied

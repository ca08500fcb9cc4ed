"""The engine behind the hunt's protocol: its steps run a random tiny model, and every token's logits are judged.

The tokens are those of the driver, so that a run is the same as without a model. After each chunk that samples, the
logits are compared with those of a pass over all tokens of the request without a cache: a stale block, a wrong table or
position shows. ``workbench hunt --scheduler engine`` needs the extra ``engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs

from workbench.analysis.hunt.own import OwnScheduler
from workbench.analysis.hunt.watch import BrokenLaw
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch, prepare_unified
from workbench.models.load import LoadedModel
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.policy import SchedulingPolicy
from workbench.trace.laws import Broken

FEATURES = ("caching", "priority", "drafts", "async", "caps", "pools", "unchunked", "partial_prefills", "evictions")
VOCAB_SIZE, LONGEST, TOLERANCE = 32000, 1024, 1e-3


@cache
def tiny_llama() -> LoadedModel:
    """Two layers of random weights that know every token of the driver."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = Model(ModelArgs("llama", **sizes, vocab_size=VOCAB_SIZE, rms_norm_eps=1e-5, num_key_value_heads=1))
    keys = iter(mx.random.split(mx.random.key(0), 100))

    def draw(weight: mx.array) -> mx.array:
        return mx.random.normal(weight.shape, key=next(keys)) / max(1.0, (weight.shape[-1] / 4) ** 0.5)

    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    weights: Any = tree_flatten(model.parameters())
    number = sum(weight.size for _, weight in weights)
    return LoadedModel(model, None, "tiny", "llama", LONGEST, frozenset(), VOCAB_SIZE, "float32", number, "random")


class EngineScheduler(OwnScheduler):
    """The scheduler of an engine, whose batches are packed and computed as the engine does.

    Raises:
        ValueError: The configuration is refused, or has drafts in asynchronous steps, which only the device knows.
    """

    features = FEATURES

    def __init__(self, config: Mapping[str, Any], policy: Callable[[], SchedulingPolicy] | None = None) -> None:
        if config.get("async_scheduling") and config.get("num_speculative_tokens"):
            raise ValueError("drafts of asynchronous steps stay in the engine")
        super().__init__(config, policy)
        self._model = tiny_llama()
        self._runner = ModelRunner(self._model, self._config, one_table=False)
        self._packed: PackedBatch | None = None
        self._waits: list[ScheduledBatch] = []  # scheduled and not packed: the output before it is to come

    def schedule(self) -> ScheduledBatch:
        """Decide a step, and pack it if the tokens before it are known."""
        batch = super().schedule()
        self._waits.append(batch)
        if len(self._waits) == 1:
            self._pack(batch)
        return batch

    def _pack(self, batch: ScheduledBatch) -> None:
        if not batch.chunks:
            self._packed = None
            return
        pool = self._runner.kv_cache
        self._packed = prepare_unified(
            batch, pool.block_size, num_blocks=pool.num_blocks, previous=self._packed, groups=self._runner.groups
        )

    def update(self, plan: ScheduledBatch, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Compute the oldest step in flight, judge it, take in its output, and pack the next one."""
        if self._packed is not None:
            self._judge(plan, self._runner.forward(self._packed)[0].values)
        ended = super().update(plan, tokens)
        self._waits.pop(0)
        if self._waits:
            self._pack(self._waits[0])
        return ended

    def _judge(self, plan: ScheduledBatch, logits: mx.array) -> None:
        """Compare the first logits of each chunk that samples with those of the whole sequence."""
        row = 0
        for chunk in plan.chunks:
            if chunk.samples and chunk.request.status != "finished":
                known = chunk.request.token_ids[: chunk.start + chunk.num_tokens - len(chunk.drafts)]
                wanted = np.asarray(self._model.model(mx.array([known]))[0, -1])
                off = float(np.abs(np.asarray(logits[row]) - wanted).max())
                if not off < TOLERANCE:
                    what = f"other logits than those of its tokens: they are off by {off:.3g} at position {len(known)}"
                    raise BrokenLaw(Broken("content", plan.step, chunk.request_id, what))
            row += chunk.num_logits

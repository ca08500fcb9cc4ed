"""The design that a unified, paged engine replaces: separate prefill and decode steps, and no KV kept between chunks.

A prefill step packs chunks of several prompts into one row of tokens under a dense block-diagonal mask. Attention
cannot read an earlier chunk's keys, so every chunk is recomputed from position 0 together with all earlier ones:
a prompt of n tokens in chunks of c costs c + 2c + ... + n rows. Only the pass of the last chunk, which holds the whole
prompt, leaves a KV cache. Decodes are then batched separately, in mlx-lm's left-padded cache, and wait
while any prompt is unfinished.

The model is mlx-lm's, unchanged. It rotates a packed row by running positions, not by positions that restart with
each prompt. Attention under RoPE depends only on differences of positions, so each prompt gets the same result as
alone, provided that its decodes continue counting from its place in the row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache
from serving.replay import Events


@dataclass
class Sequence:
    """A request in progress: the computed part of its prompt (recomputed with each chunk), and its last token."""

    index: int
    prompt: list[int]
    tokens_left: int
    num_done: int = 0
    last_token: int = -1


@dataclass
class PackedLayerCache:
    """The cache object of a layer in a prefill step: the mask, and a place for K and V.

    Attributes:
        mask: bool [T, T], True where a row may attend.
        keys: [1, num_kv_heads, T, head_dim] after the call.
        values: The same shape.
    """

    mask: mx.array
    offset: int = 0
    keys: mx.array | None = field(default=None, repr=False)
    values: mx.array | None = field(default=None, repr=False)

    def make_mask(self, num_rows: int, **kwargs: object) -> mx.array:
        """The dense mask, for any arguments."""
        return self.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Attend only to this row: there is no earlier KV."""
        self.keys, self.values = keys, values
        return keys, values


class PhaseSeparatedEngine:
    """Prefill steps first, decode steps when no prompt is left.

    Args:
        model: An mlx-lm model of the llama family.
        token_budget: Maximum number of new prompt tokens in a prefill step; recomputed tokens are not counted.
    """

    def __init__(self, model: nn.Module, token_budget: int) -> None:
        self._model, self._budget = model, token_budget
        self._prompts: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._kv_cache: list[BatchKVCache] = []
        self.num_prefill_rows = 0

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._prompts.append(Sequence(index, prompt, max_tokens))

    def step(self) -> Events:
        """A prefill step if any prompt is unfinished, else a decode step."""
        return self._prefill() if self._prompts else self._decode()

    def _prefill(self) -> Events:
        events, chunks, budget = Events(), [], self._budget
        for sequence in self._prompts:
            if not budget:
                break
            if not sequence.num_done:
                events.scheduled.append(sequence.index)
            num_new = min(budget, len(sequence.prompt) - sequence.num_done)
            sequence.num_done += num_new
            budget -= num_new
            chunks.append(sequence)
        bounds = np.cumsum([0, *(sequence.num_done for sequence in chunks)])
        self.num_prefill_rows += int(bounds[-1])
        caches = [PackedLayerCache(_block_diagonal_mask(bounds)) for _ in self._model.layers]
        packed = [token for sequence in chunks for token in sequence.prompt[: sequence.num_done]]
        hidden = self._model.model(mx.array([packed]), cache=caches)
        finished = [i for i, sequence in enumerate(chunks) if sequence.num_done == len(sequence.prompt)]
        if not finished:
            mx.eval(hidden)  # an intermediate chunk: its computation is thrown away
            return events
        tokens = mx.argmax(_head(self._model, hidden[0, mx.array(bounds[1:][finished] - 1)]), axis=-1)
        joining = [_batched([(int(bounds[i]), int(bounds[i + 1])) for i in finished], cache) for cache in caches]
        if self._kv_cache:
            for cache, other in zip(self._kv_cache, joining, strict=True):
                cache.extend(other)
        else:
            self._kv_cache = joining
        mx.eval(tokens, [cache.keys for cache in self._kv_cache], [cache.values for cache in self._kv_cache])
        done = [chunks[i] for i in finished]
        self._decoding += done
        self._prompts = deque(sequence for sequence in self._prompts if sequence not in done)
        return self._give_out(events, done, tokens.tolist())

    def _decode(self) -> Events:
        inputs = mx.array([[sequence.last_token] for sequence in self._decoding])
        tokens = mx.argmax(self._model(inputs, cache=self._kv_cache)[:, -1], axis=-1).tolist()
        return self._give_out(Events(), self._decoding, tokens)

    def _give_out(self, events: Events, sequences: list[Sequence], tokens: list[int]) -> Events:
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.last_token = token
            sequence.tokens_left -= 1
            events.tokens.append((sequence.index, token))
        keep = [i for i, sequence in enumerate(self._decoding) if sequence.tokens_left]
        if len(keep) < len(self._decoding):
            self._decoding = [self._decoding[i] for i in keep]
            if not keep:
                self._kv_cache = []
            for cache in self._kv_cache:
                cache.filter(mx.array(keep))
        return events


def _block_diagonal_mask(bounds: np.ndarray) -> mx.array:
    """A mask that is causal inside each segment of a packed row and False between segments: bool [T, T]."""
    segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    row = np.arange(len(segment))
    return mx.array((segment[:, None] == segment[None, :]) & (row[None, :] <= row[:, None]))


def _head(model: nn.Module, hidden: mx.array) -> mx.array:
    """Logits of hidden states [num_rows, hidden_size], through the output matrix or the tied embedding."""
    return model.lm_head(hidden) if "lm_head" in model else model.model.embed_tokens.as_linear(hidden)


def _batched(spans: list[tuple[int, int]], packed: PackedLayerCache) -> BatchKVCache:
    """Spans [start, end) of a packed row as a left-padded batch whose positions continue from each span's end."""
    singles = []
    for start, end in spans:
        single = KVCache()
        single.keys, single.values = packed.keys[:, :, start:end], packed.values[:, :, start:end]
        single.offset = end - start
        singles.append(single)
    batch = BatchKVCache.merge(singles)
    batch.offset = batch.offset + mx.array([start for start, _ in spans])
    return batch

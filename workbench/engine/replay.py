"""Run a step of a trace again on the paged engine, in several ways, and find where their numbers part.

"The same prompt gave another answer" has two kinds of causes. A sum in another order is rounded otherwise, and at a
near tie another token wins. Or the step read what it should not have: a block of somebody else, a stale one, a row at a
wrong position. Rounding stays below a bound in every layer; the other kind is beyond it in the first layer that reads
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np

from workbench.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch, Segment, pack
from workbench.engine.replay_needs import check_adapters, check_model, check_trace, judges_tokens, step_with_chunks
from workbench.engine.shadow import copied_call
from workbench.models.capture import LayerCapture
from workbench.models.load import LoadedModel, load_model
from workbench.models.preflight import WORST_ROW
from workbench.models.preflight_result import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

    from workbench.trace import Chunk, StepRecord, Trace

AS_IT_WAS, WITHOUT_HIT, OTHER_CHUNKS = "as it was", "without its prefix hit", "in other chunks"
NUM_CHUNKS = 3
"""Chunks of the context in the way `OTHER_CHUNKS`."""

Kind = Literal["equal", "rounding", "wrong block", "wrong row", "wrong attention"]


@dataclass(frozen=True)
class Parting:
    """The difference between a request's numbers in one way and those that it has alone.

    Attributes:
        request_id: The request.
        way: "as it was": in its batch, over the blocks that the trace's steps have written. "without its prefix hit":
            in its batch, over blocks that nobody else has. "in other chunks": alone, its context in three chunks.
        kind: "equal" to the last bit; "rounding"; "wrong block": keys or values of its context are others; "wrong row":
            those of the step's own tokens are; "wrong attention": only what attention made of them.
        layer: The first layer with a difference, of a size that decides ``kind``; None if equal.
        position: The first such position in the request's sequence; None if equal.
        block: The block that the trace names for it.
        error: The difference there: root mean square, relative to that of the layer's numbers.
        bound: Largest error that rounding explains.
        logits_error: Error of the logits, relative to their spread.
        token_id: The most likely token after the last row.
        alone_token_id: The same when the request is alone.
        recorded_token_id: The token that the trace has for the last row; None if it sampled none.
        recorded_gap: The recorded token's logit below the largest, relative to the logits' spread: 0 if it is the most
            likely token. None without a recorded token, with drafts, and if the token was thrown away.
    """

    request_id: str
    way: str
    kind: Kind
    layer: int | None
    position: int | None
    block: int | None
    error: float
    bound: float
    logits_error: float
    token_id: int
    alone_token_id: int
    recorded_token_id: int | None
    recorded_gap: float | None

    @property
    def is_other_token(self) -> bool:
        """Whether rounding does not explain the recorded token: it moves either of two logits by up to ``bound``."""
        return self.recorded_gap is not None and not self.recorded_gap <= 2 * self.bound

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain the difference."""
        return self.kind not in ("equal", "rounding")

    def __str__(self) -> str:
        tokens = (
            "the same token"
            if self.token_id == self.alone_token_id
            else (f"token {self.token_id} instead of {self.alone_token_id}")
        )
        if self.recorded_gap:
            tokens += f" (recorded: {self.recorded_token_id}, {self.recorded_gap:.1e} below it)"
        begin = f"{self.request_id} {self.way}: "
        if self.layer is None:
            return f"{begin}equal to the last bit, {tokens}"
        place = f"layer {self.layer}, position {self.position}" + (
            "" if self.block is None else f", block {self.block}"
        )
        return (
            f"{begin}{self.kind} from {place}, error {self.error:.1e} (rounding: up to {self.bound:.0e}); "
            f"logits differ by {self.logits_error:.1e}, {tokens}"
        )


@dataclass(frozen=True)
class Replay:
    """A step that was run again.

    Attributes:
        step: Its index.
        partings: Its requests in every way, compared with each request alone.
    """

    step: int
    partings: tuple[Parting, ...]

    @property
    def wrong(self) -> list[Parting]:
        """The differences that rounding does not explain."""
        return [parting for parting in self.partings if parting.is_wrong]

    @property
    def other_tokens(self) -> list[Parting]:
        """Recorded tokens that rounding does not explain: they were computed from other numbers than these.

        Recordings of vLLM do not say which requests were greedy, so tokens of others are among them.
        """
        return [parting for parting in self.partings if parting.way == AS_IT_WAS and parting.is_other_token]

    def of(self, request_id: str) -> list[Parting]:
        """The partings of one request."""
        return [parting for parting in self.partings if parting.request_id == request_id]

    def __str__(self) -> str:
        return "\n".join([f"step {self.step}, compared with each request alone:", *map(str, self.partings)])

    __repr__ = __str__


def replay(
    trace: Trace,
    step: int,
    model: str | Path | LoadedModel,
    *,
    config: EngineConfig | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Replay:
    """Run a step again as it was, without prefix hits, alone and in other chunks, and compare layer by layer.

    The pool is filled as the trace says: the steps before are run again, as far as this one reads what they wrote.

    Args:
        trace: A recording with token ids, ours or vLLM's, from its first step on, with one KV cache group.
        step: Index of the step.
        model: The model that was recorded; its KV type and backend are those of ``config``.
        config: ``attention_backend``, ``kv_cache_dtype`` and ``max_lora_rank`` are used; None for the trace's, if it
            has them.
        adapters: The folder of each adapter (LoRA) by its name, for requests that were computed with one.

    Raises:
        ValueError: The trace lacks what a replay needs, or the model or an adapter is not the recorded one; the message
            says what.
    """
    record = step_with_chunks(trace, step)
    check_trace(trace, record)
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    return _Replayer(trace, record, loaded, config or _config_of(trace), adapters or {}).run()


def attention_call(
    trace: Trace,
    record: StepRecord,
    model: LoadedModel,
    layer: int,
    *,
    config: EngineConfig | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> dict[str, Any]:
    """One layer's attention call in a step that is run again as it was, over the blocks that its trace names.

    Args:
        trace: As in `replay`.
        record: The step; it has chunks.
        model: The model that was recorded.
        layer: Index of the layer.
        config: As in `replay`.
        adapters: As in `replay`.

    Returns:
        The call, see `workbench.engine.shadow.copied_call`.

    Raises:
        ValueError: The trace lacks what a replay needs; the message says what.
    """
    check_trace(trace, record)
    return _Replayer(trace, record, model, config or _config_of(trace), adapters).attention_call(layer)


def _config_of(trace: Trace) -> EngineConfig:
    names = ("attention_backend", "kv_cache_dtype", "max_lora_rank")
    return EngineConfig(**{name: trace.config[name] for name in names if name in trace.config})


class _Replayer:
    """Runs batches over one pool, whose blocks have new numbers: those of a recording may be many."""

    def __init__(
        self,
        trace: Trace,
        record: StepRecord,
        model: LoadedModel,
        config: EngineConfig,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self._trace, self._record, self._size = trace, record, record.block_size
        self._model, self._adapters = model, adapters or {}
        self._tokens = {chunk.request_id: self._tokens_of(chunk.request_id) for chunk in record.chunks}
        self._history = list(self._needed())
        batches = [*self._history, list(self._chunks(record))]
        tables = [table for batch in batches for _, table in batch]
        self._block_of = {
            block: index for index, block in enumerate(dict.fromkeys([0, *(b for t in tables for b in t)]))
        }
        own = [-(-chunk.num_kv // self._size) for chunk in record.chunks]
        self._own_tables, first = [], len(self._block_of)
        for count in own:
            self._own_tables.append(list(range(first, first + count)))
            first += count
        self._spare = list(range(first, first + max(own)))
        num_blocks = first + max(own)
        rows = [sum(chunk.num_tokens for chunk, _ in batch) for batch in batches]
        budget = max(config.max_num_batched_tokens, *rows, *(chunk.num_kv for chunk in record.chunks))
        config = config.replace(
            num_blocks=max(2, num_blocks), block_size=self._size, max_num_batched_tokens=budget, max_loras=0
        )
        self._runner = ModelRunner(model, config)

    def _tokens_of(self, request_id: str) -> list[int]:
        """The prompt of a request and all tokens that the trace has of its output."""
        check_adapters(self._trace.requests[request_id], self._adapters)
        prompt = self._trace.requests[request_id].prompt_token_ids
        if not prompt:
            raise ValueError(f"request {request_id!r} has no token ids in this trace: record with token_ids=True")
        accepted = [one.accepted for record in self._trace for one in record.chunks if one.request_id == request_id]
        tokens = [*prompt, *(token for one in accepted for token in one)]
        if max(tokens) >= self._model.vocab_size:
            have = f"request {request_id!r} has token {max(tokens)}, and the model {self._model.vocab_size}"
            raise ValueError(f"{have}: give the recorded one")
        return tokens

    def _chunks(self, record: StepRecord) -> Iterator[tuple[Chunk, list[int]]]:
        for index, chunk in enumerate(record.chunks):
            yield chunk, record.block_table(index)[: -(-chunk.num_kv // self._size)]

    def _needed(self) -> Iterator[list[tuple[Chunk, list[int]]]]:
        """The chunks before the step that wrote blocks which it reads, or which those read, by step."""
        read = {block for _, table in self._chunks(self._record) for block in table}
        batches = []
        for record in reversed([one for one in self._trace if one.step < self._record.step]):
            found = []
            for chunk, table in reversed(list(self._chunks(record))):
                if read.intersection(table[chunk.first_position // self._size :]):
                    read.update(table)
                    found.append((chunk, table))
                    if chunk.request_id not in self._tokens:
                        self._tokens[chunk.request_id] = self._tokens_of(chunk.request_id)
            if found:
                batches.append(found[::-1])
        return reversed(batches)

    def _segment(self, chunk: Chunk, table: Sequence[int], samples: int = 1) -> Segment:
        known = chunk.num_tokens - len(chunk.drafts)
        tokens = self._tokens[chunk.request_id][chunk.first_position :][:known]
        tokens += [0] * (known - len(tokens)) + [max(0, draft) for draft in chunk.drafts]
        return Segment(table, chunk.first_position, chunk.num_tokens, tokens, samples, chunk.request_id)

    def _compute(self, table: Sequence[int], request_id: str, stop: int, num_chunks: int = 1) -> None:
        """Compute the first tokens of a request alone, in chunks."""
        size = -(-stop // num_chunks)
        for start in range(0, stop, max(1, size)):
            end = min(stop, start + size)
            tokens = self._tokens[request_id][start:end]
            self._runner.forward(self._pack([Segment(table, start, end - start, tokens, 0, request_id)]))

    def _pack(self, segments: Sequence[Segment]) -> PackedBatch:
        """A batch, with the adapters of its requests."""
        packed = pack(segments, self._size)
        adapters = [self._trace.requests[name].adapter for name in packed.request_ids]
        return replace(packed, adapters=adapters) if any(adapters) else packed

    def run(self) -> Replay:
        """Run all ways and compare them."""
        try:
            return Replay(self._record.step, tuple(self._partings()))
        finally:
            self._runner.close()

    def attention_call(self, layer: int) -> dict[str, Any]:
        """One layer's attention call of the step as it was, its blocks with their numbers in the trace."""
        try:
            self._fill_pool()
            layers, copied = self._runner.kv_cache.kernel_layers, list[dict[str, Any]]()
            if not 0 <= layer < len(layers):
                raise ValueError(f"layer must be from 0 to {len(layers) - 1}, got {layer!r}")
            layers[layer].taps.append(lambda call: copied.append(copied_call(call)))
            self._runner.forward(self._batch(self._recorded_tables()))
        finally:
            self._runner.close()
        numbers = np.array(list(self._block_of))
        return dict(copied[0], block_ids=numbers[copied[0]["block_ids"]])

    def _recorded_tables(self) -> list[list[int]]:
        return [[self._block_of[block] for block in table] for _, table in self._chunks(self._record)]

    def _fill_pool(self) -> None:
        """Run the chunks again that have written what the step reads."""
        runner = self._runner
        if runner.mode != "kernel":
            raise ValueError(f"the layers of this model cannot be looked at: {runner.preflight.reason}")
        check_model(self._trace, runner.describe())
        for name, folder in self._adapters.items():
            runner.adapters.add(name, folder)
        for batch in self._history:
            segments = [self._segment(chunk, [self._block_of[block] for block in table], 0) for chunk, table in batch]
            runner.forward(self._pack(segments))

    def _partings(self) -> Iterator[Parting]:
        record = self._record
        self._fill_pool()
        ways = {AS_IT_WAS: self._captured(self._batch(self._recorded_tables()))}
        for chunk, table in zip(record.chunks, self._own_tables):
            self._compute(table, chunk.request_id, chunk.first_position)
        ways[WITHOUT_HIT] = self._captured(self._batch(self._own_tables))
        for index, chunk in enumerate(record.chunks):
            alone = self._captured(self._batch([self._own_tables[index]], [chunk]))
            for way, made in ways.items():
                yield self._parting(index, way, made, index, alone)
            self._compute(self._spare, chunk.request_id, chunk.first_position, NUM_CHUNKS)
            yield self._parting(index, OTHER_CHUNKS, self._captured(self._batch([self._spare], [chunk])), 0, alone)

    def _batch(self, tables: Sequence[Sequence[int]], chunks: Sequence[Chunk] | None = None) -> PackedBatch:
        pairs = zip(self._record.chunks if chunks is None else chunks, tables)
        return self._pack([self._segment(chunk, table) for chunk, table in pairs])

    def _captured(self, packed: PackedBatch) -> tuple[list[LayerCapture], np.ndarray]:
        """The layers of a forward pass, and its logits."""
        layers = self._runner.kv_cache.kernel_layers
        captures = [LayerCapture(index) for index in range(len(layers))]
        taps = [partial(_fill, capture, self._record.step, packed.request_ids) for capture in captures]
        for layer, tap in zip(layers, taps):
            layer.taps.append(tap)
        try:
            logits, _ = self._runner.forward(packed)
        finally:
            for layer, tap in zip(layers, taps):
                layer.taps.remove(tap)
        return captures, np.array(logits.values, dtype=np.float64)

    @property
    def _bound(self) -> float:
        """Largest error of a row that rounding explains: the last bit of an input changes codes of activations."""
        of_codes = TOLERANCE[mx.int8] if self._model.activations == "int8" else 0.0
        return WORST_ROW * max(self._runner.preflight.bound, of_codes)

    def _parting(
        self,
        index: int,
        way: str,
        made: tuple[list[LayerCapture], np.ndarray],
        sequence: int,
        alone: tuple[list[LayerCapture], np.ndarray],
    ) -> Parting:
        """Compare one sequence of a batch with the same request alone."""
        chunk, bound = self._record.chunks[index], self._bound
        kind: Kind = "equal"
        layer = position = None
        error = 0.0
        for ours, theirs in zip(made[0], alone[0]):
            for errors, first, of_attention in _errors(ours, theirs, sequence, chunk.first_position):
                beyond = np.flatnonzero(~(errors <= bound))
                if len(beyond):
                    layer, position, error = ours.layer, first + int(beyond[0]), float(errors[beyond[0]])
                    is_own = position >= chunk.first_position
                    kind = "wrong attention" if of_attention else "wrong row" if is_own else "wrong block"
                    break
                if kind == "equal" and errors.any():
                    at = int(errors.argmax())
                    kind, layer, position, error = "rounding", ours.layer, first + at, float(errors[at])
            if kind not in ("equal", "rounding"):
                break
        ours_logits, alone_logits = made[1][sequence], alone[1][0]
        table = self._record.block_table(index)
        spread = float(alone_logits.std()) or 1.0
        gap = None
        is_judged = judges_tokens(self._trace, self._model, self._trace.requests[chunk.request_id])
        if is_judged and chunk.sampled is not None and not chunk.drafts and not chunk.discarded:
            gap = float(ours_logits.max() - ours_logits[chunk.sampled]) / spread
        return Parting(
            chunk.request_id,
            way,
            kind,
            layer,
            position,
            table[position // self._size] if position is not None and way == AS_IT_WAS else None,
            error,
            bound,
            float(np.sqrt(np.square(ours_logits - alone_logits).mean())) / spread,
            int(ours_logits.argmax()),
            int(alone_logits.argmax()),
            chunk.sampled,
            gap,
        )


def _fill(capture: LayerCapture, step: int, request_ids: Sequence[str], call: object) -> None:
    capture.fill(step, call, request_ids)  # type: ignore[arg-type]


def _errors(
    ours: LayerCapture, theirs: LayerCapture, sequence: int, first_position: int
) -> Iterator[tuple[np.ndarray, int, bool]]:
    """Errors of a layer's keys, values and output by position, the position of the first, and whether it is output."""
    for made, expected in ((ours.keys[sequence], theirs.keys[0]), (ours.values[sequence], theirs.values[0])):
        yield _relative(made, expected), 0, False
    begin, end = ours.cu_seqlens_q[sequence : sequence + 2]
    yield _relative(ours.out[begin:end], theirs.out), first_position, True


def _relative(made: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Root mean square of the difference of each row, relative to that of all rows."""
    difference = np.square((made - expected).reshape(len(made), -1)).mean(axis=1)
    return np.sqrt(difference / max(float(np.square(expected).mean()), 1e-30))

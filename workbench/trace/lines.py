"""The lines of a trace other than its steps: the header, the requests, a keyframe, supplements and the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from workbench.trace.fields import EMPTY, BlockId, Count, Offset, Rows, Seconds, TokenId, Tokens
from workbench.trace.pool_change import Runs
from workbench.trace.records import Frozen, StepRecord

if TYPE_CHECKING:
    BlockIds = tuple[BlockId, ...]
else:  # in a file, runs of neighbours are named by their ends
    BlockIds = Runs

SCHEMA_VERSION = 4
"""Version of the trace file format that is written.

In a mapping of requests to reasons, each reason is written once: the number n stands for the n-th different one,
counted from 0. The last fields of a chunk that have their default are left out. The free queue and the cached blocks of
a keyframe are `Runs`; block ids without runs are read too. Version 4 is the first that a release
writes; a reader refuses any other by name.
"""

MAX_NAME = 100
"""Maximum length of a supplement's name, in characters."""

DISTURBED = "disturbed"
"""Name of the supplement that marks a step during which the process was busy with something else."""

BlockHashes = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})*$")]


HASH_DIGITS = 16
"""Hexadecimal digits of a block's hash, which has 64 bits."""


class PrefixHashes(msgspec.Struct, frozen=True):
    """The block hashes of a recording: chained, so that equal hashes mean equal prefixes.

    Attributes:
        key_id: Distinguishes the random keys of runs; hashes made with different keys cannot be compared.
        block_size: Tokens per hash.
        num_lookahead_tokens: Tokens after these that a hash covers too.
    """

    key_id: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    block_size: Rows
    num_lookahead_tokens: Tokens = 0


class TraceMeta(Frozen, frozen=True, tag="meta", tag_field="kind"):
    """First line of a trace: its source, configuration and model.

    Attributes:
        schema_version: Version of this format.
        source: "engine", "simulation", or another engine's name and version, such as "vllm 0.33.0".
        config: The engine configuration by field name.
        model: Facts about the model (name, layers, heads, dtype), by name.
        versions: Versions of the software that wrote the trace.
        created: Wall-clock time of the moment from which times count, seconds since the epoch.
        prefix_hashes: The key and the size of its ``block_hashes``; unset if it has none.
    """

    schema_version: int = SCHEMA_VERSION
    source: str = "engine"
    config: Mapping[str, Any] = EMPTY
    model: Mapping[str, Any] = EMPTY
    versions: Mapping[str, str] = EMPTY
    created: Seconds = 0.0
    prefix_hashes: PrefixHashes | msgspec.UnsetType = msgspec.UNSET
    _mappings = ("config", "model", "versions")

    @property
    def is_of_vllm(self) -> bool:
        """Whether vLLM was recorded, or its recorded run simulated again."""
        return self.source.startswith("vllm ")

    @property
    def is_of_sglang(self) -> bool:
        """Whether SGLang was recorded, or its requests simulated again, by vLLM's rules."""
        return self.source.startswith("sglang ")

    @property
    def is_of_server(self) -> bool:
        """Whether another engine than Workbench's was recorded."""
        return self.is_of_vllm or self.is_of_sglang


class RequestInfo(Frozen, frozen=True, omit_defaults=True, tag="request", tag_field="kind"):
    """A request as it arrived, written to the trace at that moment.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Length of the prompt in tokens.
        prompt_token_ids: The prompt; empty when a recording leaves tokens out.
        prompt: The prompt as text, when there was one.
        max_tokens: Maximum number of output tokens.
        arrival_step: The first step whose scheduling could see the request.
        arrival_time: Seconds since the start of the trace.
        priority: Smaller is served first under the "priority" policy.
        sampling: Sampling parameters that differ from the defaults, by name.
        cache_salt: Only requests with the same salt share prefixes. Recordings and servers have a digest of it.
        adapter: Name of the adapter (LoRA) that it is computed with; "" for the model alone.
        block_hashes: Keyed hash of each full block of the prompt, of HASH_DIGITS hexadecimal digits, one behind the
            other; those of later blocks are in the supplement "block_hashes" of the step in which the request ended.
    """

    request_id: str
    num_prompt_tokens: Rows
    prompt_token_ids: tuple[TokenId, ...] = ()
    prompt: str = ""
    max_tokens: Count = 16
    arrival_step: Count = 0
    arrival_time: Seconds = 0.0
    priority: int = 0
    sampling: Mapping[str, Any] = EMPTY
    cache_salt: str = ""
    adapter: str = ""
    block_hashes: BlockHashes = ""
    _mappings = ("sampling",)


class LastToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The latest output token of a request.

    Attributes:
        step: The step that sampled it.
        end: End of that step, in seconds since the start of the trace; 0 without a clock.
    """

    step: Count
    end: Seconds = 0.0


class Keyframe(Frozen, frozen=True, tag="keyframe", tag_field="kind"):
    """The scheduler's memory before a step, so that a trace can begin in the middle of a run.

    Attributes:
        step: The step that follows.
        block_tables: Block table of every request that holds KV blocks, in order of admission.
        num_kv_computed: KV progress of the same requests.
        free_block_ids: The free queue; the first is the next one to be allocated.
        cached_block_ids: Every block whose content is in the prefix cache, owned or free.
        other_tables: The block tables of the KV cache groups after the first, for the same requests.
        zero: The moment from which the run counts its times (`workbench.trace.run_zero`), in seconds since the start
            of the trace; unset if it is not known.
        last_tokens: The latest output token of each request that is open and has one, as far as it is known.
    """

    step: Count
    block_tables: Mapping[str, tuple[BlockId, ...]] = EMPTY
    num_kv_computed: Mapping[str, Tokens] = EMPTY
    free_block_ids: BlockIds = ()
    cached_block_ids: BlockIds = ()
    other_tables: Mapping[str, tuple[tuple[BlockId, ...], ...]] = EMPTY
    zero: Seconds | msgspec.UnsetType = msgspec.UNSET
    last_tokens: Mapping[str, LastToken] = EMPTY
    _mappings = ("other_tables", "block_tables", "num_kv_computed", "last_tokens")


class Supplement(Frozen, frozen=True, tag="supplement", tag_field="kind"):
    """Facts about a step that became known after its record was made.

    A step has no more than one supplement of each name. The names so far:

    - "shadow": the result of a shadow launch of the Metal kernel (`workbench.engine.shadow.ShadowLauncher`).
    - "top_tokens": the most likely tokens beside each output token (`workbench.trace.readings.top_tokens`).
    - "block_hashes": for each request that ended the hashes of the blocks after those of its prompt (`PrefixHashes`).
    - "disturbed": what the process was busy with besides the step, such as ``{"by": "a loading page"}``; fits of step
      durations leave the step out (``Trace.mark_disturbed``).
    - "host": what the machine did during a long step of vLLM (`workbench.simulation.costs.stalls.causes_of`).

    Attributes:
        step: Index of the step (``StepRecord.step``).
        name: The kind of facts.
        facts: The facts by name.
    """

    step: Count
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    facts: Mapping[str, Any] = EMPTY
    _mappings = ("facts",)


TraceEndReason = Literal["", "done", "stuck", "max_steps", "part", "cut"]
"""The end of a trace: "" while it is live, "done" when every request ended, "stuck" when nothing more could be
scheduled, "max_steps" when the steps asked for were taken, "part" when the run has more steps than the file, which is
that of a slice, "cut" when its file ends too early, or its run with a fault."""


class TraceEnd(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """Last line of a trace: the way it ended and the number of steps before.

    Attributes:
        reason: See `TraceEndReason`.
        num_steps: Number of steps of the file.
        clock_drift: Seconds that the wall clock gained on the clock of the steps from the beginning to the last step;
            unset if nobody compared them.
    """

    reason: TraceEndReason = ""
    num_steps: Count = 0
    clock_drift: Offset | msgspec.UnsetType = msgspec.UNSET


TraceLine = TraceMeta | RequestInfo | Keyframe | StepRecord | Supplement | TraceEnd
"""The types that a line of a trace file decodes to; its "kind" field tells them apart."""

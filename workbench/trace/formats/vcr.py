"""Requests that vllm-vcr recorded between vLLM's front end and its engine: JSON lines, one for each ended request.

An optional first line holds ``meta``. A request has its lengths, its arrival, its time to first token and its gaps in
milliseconds, and hashes of the prompt's blocks, each of which stands for the whole prompt up to its end.

Source: https://neuralmagic.github.io/vllm-vcr/ and the schema in its repository, crates/sim-trace/src/trace.rs.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated, Any

import msgspec

from workbench.base.key_table import RowCheck, Rule, UnknownKeyError
from workbench.trace.errors import TraceError
from workbench.trace.file import split_lines

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


META_RULES = (
    Rule("read", "model block_size vllm_version", "the engine, and the tokens that a hash stands for"),
    Rule("harmless", "gpu tp pp dp max_num_seqs max_num_batched_tokens max_model_len source config_hash "
         "ready_response_hex *_version *_hash *_name host* date* created* note* comment* description label* tag*",
         "it describes the recorded server"),
)  # fmt: skip
"""The keys of the header, to which users may add some."""

REQUEST_RULES = (
    Rule("read", "prompt_tokens output_tokens ttft_ms cached_tokens itl_ms arrival_ms block_hashes finish_reason",
         "lengths, times and blocks"),
    Rule("harmless", "itl_tokens", "gaps are those between messages, however many tokens one has"),
    Rule("harmless", "itl_summary itl_ctx concurrency", "measured at the recorded server"),
    Rule("harmless", "output_token_ids", "only lengths matter"),
    Rule("refused", "mm_hashes", "prompts with other images share no blocks, and hashes of blocks do not show that"),
)  # fmt: skip
"""The keys of a request."""


class VcrMeta(msgspec.Struct, frozen=True):
    """The fields of the ``meta`` line that are read.

    Attributes:
        model: Name of the model; "" if it is not known.
        block_size: Tokens for each of a prompt's hashes; None without hashes.
        vllm_version: Version of the engine; "" if it is not known.
    """

    model: str | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    vllm_version: str | None = None


class VcrRequest(msgspec.Struct, frozen=True):
    """A recorded request.

    Attributes:
        prompt_tokens: Length of the prompt.
        output_tokens: Length of the output.
        ttft_ms: Time to first token.
        cached_tokens: Prompt tokens that vLLM found in its prefix cache.
        itl_ms: Gaps between the messages with its tokens; a message of a speculative step has several tokens.
        arrival_ms: Arrival since the start of the recording; None if it was not recorded.
        block_hashes: Hashes of the prompt's full blocks; None if they were not recorded.
        finish_reason: "stop", "length", "abort", "error" or "repetition"; None if it is not known.
    """

    prompt_tokens: Count
    output_tokens: Count
    ttft_ms: Milliseconds
    cached_tokens: Count = 0
    itl_ms: list[Milliseconds] | None = None
    arrival_ms: Milliseconds | None = None
    block_hashes: list[int] | None = None
    finish_reason: str | None = None

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the last token; None if the gaps were recorded as a mean only."""
        if self.itl_ms is None and self.output_tokens > 1:
            return None
        return self.ttft_ms + sum(self.itl_ms or ())


class _MetaLine(msgspec.Struct, forbid_unknown_fields=True):
    meta: dict[str, Any]


def is_vcr(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a recording of vllm-vcr, by its first line."""
    try:
        first = next((raw for raw, _ in split_lines(path) if raw.strip()), b"")
    except TraceError:  # a damaged gzip file
        return False
    start = first[:10_000]
    if start.startswith(b'{"meta"'):
        return True
    others = (b'"kind"', b'"arrival"', b'"arrival_time"', b'"timestamp"', b'"time"', b'"start_time"')  # of other logs
    return b'"ttft_ms"' in start and b"tokens" in start and not any(name in start for name in others)


def read_vcr(path: str | os.PathLike[str], ignored: Collection[str] = ()) -> tuple[VcrMeta, list[VcrRequest]]:
    """A recording of vllm-vcr.

    Args:
        path: The file, .jsonl or .jsonl.gz. A last line that was cut off is left out.
        ignored: Keys to leave out.

    Returns:
        Its header, empty if it has none, and its requests in the order in which they ended.

    Raises:
        TraceError: A line is malformed, or has an unknown key; the message names it.
        OSError: The file cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("tap.jsonl").write_text('{"prompt_tokens": 9, "output_tokens": 1, "ttft_ms": 31.5}')
        >>> read_vcr("tap.jsonl")[1][0].ttft_ms
        31.5
    """
    meta, keys = VcrMeta(), RowCheck(ignored)
    requests: list[VcrRequest] = []
    for number, (raw, is_whole) in enumerate(split_lines(path), start=1):
        place = f"{path}, line {number}"
        if not raw.strip():
            continue
        try:
            row = msgspec.json.decode(raw, type=dict[str, Any])
            if "meta" in row and not requests:
                header = msgspec.convert(row, _MetaLine).meta
                meta = msgspec.convert(keys.check(place, header, META_RULES), VcrMeta)
            else:
                requests.append(msgspec.convert(keys.check(place, row, REQUEST_RULES), VcrRequest))
        except UnknownKeyError as problem:
            raise TraceError(str(problem)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            if is_whole:
                raise TraceError(f"{place}: not a request of vllm-vcr: {problem}") from None
    keys.finish(path)
    return meta, requests

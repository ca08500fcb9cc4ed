"""Attention weights of one row of a captured layer, over the text."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import np
from workbench.viz.reprs import fragment

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def weights_facts(capture: Any, row: int, trace: Trace, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """The weights of a packed row and the tokens they belong to, as plain data for a view.

    Args:
        capture: A captured layer, with ``layer``, ``step``, ``request_ids``, ``cu_seqlens_q``, ``seqused_k`` and
            ``weights(row)`` [num_heads, kv_len].
        row: Row of the packed batch.
        trace: The trace of the run; the captured step may not be complete yet.
        decode: Function from token ids to their text.

    Returns:
        ``layer``, ``step``, ``row``, ``request``, ``position`` of the row in its sequence, ``tokens`` (one text per KV
        position), ``num_heads``, ``weights`` (base64 of uint8 [num_heads, kv_len], 255 for the largest weight of each
        head) and ``largest`` (the largest weight of each head).

    Raises:
        ValueError: Nothing has been captured yet, or there is no such row.
    """
    weights = np.asarray(capture.weights(row))
    seq = bisect.bisect_right(capture.cu_seqlens_q, row) - 1
    request_id, length = capture.request_ids[seq], capture.seqused_k[seq]
    token_ids = _token_ids(trace, request_id, length)
    largest = weights.max(axis=1, keepdims=True)
    scaled = np.round(255 * weights / np.where(largest > 0, largest, 1)).astype(np.uint8)
    return {
        "layer": capture.layer,
        "step": capture.step,
        "row": row,
        "request": request_id,
        "position": length - capture.cu_seqlens_q[seq + 1] + row,
        "tokens": [decode([token]) if token >= 0 else "" for token in token_ids],
        "num_heads": len(weights),
        "weights": base64.b64encode(scaled.tobytes()).decode("ascii"),
        "largest": [float(value) for value in largest[:, 0]],
    }


def _token_ids(trace: Trace, request_id: str, length: int) -> list[int]:
    """The first tokens of a request, prompt and output; -1 for tokens that are not in the trace."""
    info = trace.requests.get(request_id)
    tokens = list(info.prompt_token_ids[:length]) if info else []
    tokens += [-1] * (length - len(tokens))
    for record in trace:
        for chunk in record.chunks:
            if chunk.request_id != request_id:
                continue
            first = chunk.first_position + chunk.num_tokens - len(chunk.drafts)
            for position, token in enumerate(chunk.accepted, first):
                if position < length:
                    tokens[position] = token
    return tokens


def weights_html(weights: np.ndarray, tokens: Sequence[str], *, title: str = "Attention weights") -> str:
    """An HTML fragment of the text, without scripts, in which each token is as dark as the square root of its weight.

    Args:
        weights: Weight of each position, [kv_len], or of each head and position, [num_heads, kv_len]; heads are
            averaged.
        tokens: Text of each position.
        title: Heading.

    Raises:
        ValueError: The numbers of tokens and positions differ.
    """
    weights = np.asarray(weights, dtype=np.float64)
    mean = weights.mean(axis=0) if weights.ndim == 2 else weights
    if len(tokens) != len(mean):
        raise ValueError(f"tokens: {len(tokens)} texts for {len(mean)} positions")
    shares = np.round(100 * np.sqrt(mean / max(float(mean.max(initial=0.0)), 1e-12))).astype(int)
    spans = "".join(
        f'<span style="background:color-mix(in srgb,currentColor {share * 0.6:.0f}%,transparent)" '
        f'title="position {position}: {value:.4f}">{escape(text)}</span>'
        for position, (text, share, value) in enumerate(zip(tokens, shares, mean))
    )
    return fragment(
        f"<h4>{escape(title)}</h4>",
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{spans}</div>',
    )

"""A step taken phase by phase: what each phase made, as names and short texts."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

MOST_VALUES = 48
"""Values of an array that are written out."""

MOST_COLUMNS = 256
"""Columns of a picture of norms; more packed rows than that share columns, each with the largest norm of its rows."""

LAYER_ARRAYS = {"q": "queries", "out": "attention output", "k": "new keys", "v": "new values"}
"""What is shown of a layer, by the names of ``LayerCapture``."""

_WHAT = {
    "schedule": "chosen by the scheduler; nothing has been computed yet",
    "prepare": "what the forward pass is handed",
    "forward": "one row of logits for each sequence that samples",
    "sample": "the tokens that were drawn",
}
"""What a phase made, in words."""


def describe_phase(name: str, made: Any) -> dict[str, Any]:
    """The name of a phase, what it is, and facts about what it made as (name, text) pairs.

    Args:
        name: "schedule", "prepare", "layer 0", "forward" or "sample"; others are described by their attributes.
        made: What ``step_into()`` gave: a scheduled batch, a packed batch, a layer's capture, logits or a list of
            sampled tokens.

    Returns:
        ``name``, ``what`` and ``facts``; for a layer also ``layer`` and ``norms``: for each of q, k, v and out the norm
        of every head of every packed row, as a picture (`_norm_picture`).
    """
    if name.startswith("layer "):
        return _describe_layer(name, made)
    if name == "schedule":
        facts = [
            (
                chunk.request.request_id,
                f"tokens [{chunk.start}, {chunk.start + chunk.num_tokens}), {chunk.arm.replace('_', ' ')}, "
                f"limited by {chunk.limited_by.replace('_', ' ')}"
                + (f", new blocks {_values(chunk.new_block_ids)}" if len(chunk.new_block_ids) else ""),
            )
            for chunk in made.chunks
        ]
    elif name == "forward":
        facts = [("logits", f"{' x '.join(map(str, made.shape))} {made.dtype}")]
    elif name == "sample":
        facts = [(f"row {row}", f"token {token.token_id}") for row, token in enumerate(made)]
        facts = facts or [("none", "no sequence has reached its last known token")]
    else:
        public = {key: value for key, value in _attributes(made).items() if not key.startswith("_")}
        facts = [
            (key, f"{_shape(value)}{_values(value)}") for key, value in public.items() if hasattr(value, "__len__")
        ]
    return {"name": name, "what": _WHAT.get(name, ""), "facts": facts}


def _describe_layer(name: str, capture: Any) -> dict[str, Any]:
    norms = {key: np.linalg.norm(getattr(capture, key), axis=-1) for key in LAYER_ARRAYS}
    facts = [
        (key, f"{_shape(getattr(capture, key))}norm {_range(norm)}; {_not_finite(getattr(capture, key))}")
        for key, norm in norms.items()
    ]
    window = f"a sliding window of {capture.window} tokens" if capture.window > 0 else "the whole context"
    facts.append(("reads", f"{window} of {len(capture.seqused_k)} sequences, KV lengths {_values(capture.seqused_k)}"))
    facts.append(("pictures", "the norm of each head (down) of each packed row (across); darker is larger"))
    return {
        "name": name,
        "what": "its attention has written this step's keys and values and read the context; what follows it in the "
        "layer has not been computed",
        "facts": facts,
        "layer": capture.layer,
        "norms": {key: _norm_picture(norm) | {"what": LAYER_ARRAYS[key]} for key, norm in norms.items()},
    }


def _norm_picture(norms: np.ndarray) -> dict[str, Any]:
    """Norms [T, heads] as a picture with a row per head.

    Returns:
        ``num_rows`` (T), ``heads``, ``columns`` (T or MOST_COLUMNS), ``least`` and ``most`` norm, and ``picture``:
        base64 of uint8 [heads, columns], 0 for ``least`` and 255 for ``most``. NaN and infinity count as 0.
    """
    num_rows, heads = norms.shape
    columns = min(num_rows, MOST_COLUMNS)
    norms = np.nan_to_num(norms, nan=0.0, posinf=0.0)
    starts = np.arange(columns) * num_rows // columns
    shown = np.maximum.reduceat(norms, starts, axis=0)
    least, most = float(norms.min()), float(norms.max())
    scaled = np.round(255 * (shown.T - least) / ((most - least) or 1.0)).astype(np.uint8)
    return {
        "num_rows": num_rows,
        "heads": heads,
        "columns": columns,
        "least": least,
        "most": most,
        "picture": base64.b64encode(np.ascontiguousarray(scaled).tobytes()).decode("ascii"),
    }


def _range(values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "none is finite"
    return f"{finite.min():.3g} to {finite.max():.3g}, mean {finite.mean():.3g}"


def _not_finite(values: np.ndarray) -> str:
    count = int(np.count_nonzero(~np.isfinite(values)))
    return f"{count} of {values.size} numbers are NaN or infinite" if count else "every number is finite"


def _attributes(made: Any) -> dict[str, Any]:
    names = getattr(type(made), "__dataclass_fields__", None) or getattr(made, "__dict__", {})
    return {name: getattr(made, name) for name in names}


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{getattr(value, 'dtype', '')} [{', '.join(map(str, shape))}]: " if shape is not None else ""


def _values(value: Any) -> str:
    flat = value.ravel().tolist() if hasattr(value, "ravel") else list(value)
    shown = " ".join(str(item) for item in flat[:MOST_VALUES])
    return shown + (f" … {len(flat)} in all" if len(flat) > MOST_VALUES else "")

"""The phases of a step that is taken phase by phase: the result of each as names and short texts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from workbench.base.on_demand import np
from workbench.base.text import counted
from workbench.trace.readings.top_tokens import Candidate, TopTokens
from workbench.viz.layout.norms import norm_marks
from workbench.viz.words import limit_of, role_of

MOST_VALUES = 48
"""Maximum number of values of an array that are written out."""

SHOWN_TOKENS = 5
"""Number of tokens that are listed for a row of logits."""

LAYER_ARRAYS = {"q": "queries", "out": "attention output", "k": "new keys", "v": "new values"}
"""Arrays of a `LayerCapture` that are shown, each with its description."""

_DESCRIPTIONS = {
    "schedule": "the scheduler's decisions; nothing has been computed yet",
    "prepare": "the input of the forward pass",
    "forward": "one row of logits for each sequence that samples, and one more for each of its drafts",
    "mask": "the tokens that grammars allow; all others get no probability",
    "sample": "the sampled tokens",
    "draft": "draft tokens for the next step",
}
"""Description of the result of a phase."""


def describe_phase(name: str, result: Any) -> dict[str, Any]:
    """The name of a phase, a description, and facts about its result as (name, text) pairs.

    Args:
        name: "schedule", "prepare", "layer 0", "forward", "mask", "sample" or "draft"; others are described by their
            attributes.
        result: Result of the phase, as ``step_into()`` returns it: a scheduled batch, a packed batch, the capture of a
            layer, logits, allowed tokens by row, a list of sampled tokens, or drafts by request.

    Returns:
        ``name``, ``what`` (the description) and ``facts``; for a layer also ``layer`` and ``norms``: for each of q, k,
        v and out the norm of every head of every packed row, as a picture (`_norm_picture`).
    """
    if name.startswith("layer "):
        return _describe_layer(name, result)
    if name == "schedule":
        facts = [(chunk.request.request_id, _chunk_words(chunk, result.block_size)) for chunk in result.chunks]
    elif name == "forward":
        facts = [("logits", f"{' x '.join(map(str, result.shape))} {result.dtype}")]
    elif name == "mask":
        facts = [(f"row {row}", f"{allowed.sum()} of {allowed.size} tokens") for row, allowed in result.items()]
        facts = facts or [("none", "no sequence with a grammar has reached its last known token")]
    elif name == "sample":
        facts = [(f"row {row}", f"token {token.token_id}") for row, token in enumerate(result)]
        facts = facts or [("none", "no sequence has reached its last known token")]
    elif name == "draft":
        facts = [(request_id, f"tokens {_values(drafts.token_ids)}") for request_id, drafts in result.items()]
        facts = facts or [("none", "the proposer has none")]
    else:
        public = {key: value for key, value in _attributes(result).items() if not key.startswith("_")}
        facts = [
            (key, f"{_shape(value)}{_values(value)}") for key, value in public.items() if hasattr(value, "__len__")
        ]
    return {"name": name, "what": _DESCRIPTIONS.get(name, ""), "facts": facts}


class LogitsRow(NamedTuple):
    """A row of logits: that of a request's last known token, or of one of its drafts.

    Attributes:
        request_id: The request.
        token: The token that was sampled from the row; None before sampling, and behind a rejected draft.
        draft: The draft for the place of that token; None behind the last one, and for padding.
        draft_probability: The probability with which the proposer drew the draft; None if it was not drawn at random.
    """

    request_id: str
    token: int | None
    draft: int | None = None
    draft_probability: float | None = None


def rows_of_logits(chunks: Sequence[Any], sampled: Sequence[int | None], drafts: Mapping[str, Any]) -> list[LogitsRow]:
    """The rows of a step's logits.

    Args:
        chunks: The scheduled chunks of the step.
        sampled: The sampled tokens of all chunks in order, one or more for each that samples; empty before sampling.
        drafts: By request the drafts that are verified: an object with ``probabilities``, a distribution for each
            draft or None.
    """
    rows = []
    tokens = iter(sampled)
    for chunk in chunks:
        if not chunk.samples:
            continue
        request_id, rejected = chunk.request.request_id, False
        probabilities = getattr(drafts.get(request_id), "probabilities", None)
        for index, draft in enumerate((*chunk.drafts, None)):
            token = None if rejected else next(tokens, None)
            rejected = rejected or token != draft
            known = draft if draft is not None and draft >= 0 else None
            probability = None
            if known is not None and probabilities is not None and index < len(probabilities):
                probability = float(probabilities[index][known])
            rows.append(LogitsRow(request_id, token, known, probability))
    return rows


def verified_drafts(logits: Any, rows: Sequence[LogitsRow], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The drafts of a step with the model's probability of each, before temperature and penalties.

    Args:
        logits: [num_rows, vocab_size], the model's own.
        rows: The rows; those without a draft are passed over.
        decode: Text of token ids.

    Returns:
        For each draft ``request``, ``id``, ``text``, ``probability``, ``draft_probability`` (None if the proposer drew
        nothing) and ``accepted`` (None before sampling, and behind a rejected draft).
    """
    found = []
    for row, (request_id, token, draft, draft_probability) in zip(np.array(logits, dtype=np.float64), rows):
        if draft is None or not np.isfinite(row.max()):
            continue
        weights = np.exp(row - row.max())
        found.append(
            {
                "request": request_id,
                "id": draft,
                "text": decode([draft]),
                "probability": float(weights[draft] / weights.sum()),
                "draft_probability": draft_probability,
                "accepted": None if token is None else token == draft,
            }
        )
    return found


def likely_tokens(logits: Any, request_ids: Sequence[str], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The most likely tokens of each row of logits, with their probabilities before temperature and penalties.

    Args:
        logits: [num_rows, vocab_size], the model's own.
        request_ids: The request of each row.
        decode: Text of token ids.

    Returns:
        A `TopTokens` as a dictionary for each row.
    """
    found = []
    for row, request_id in zip(np.array(logits, dtype=np.float64), request_ids):
        if not np.isfinite(row.max()):
            continue
        weights = np.exp(row - row.max())
        probabilities = weights / weights.sum()
        top = np.argsort(-probabilities, kind="stable")[:SHOWN_TOKENS].tolist()
        candidates = tuple(Candidate(token, float(probabilities[token])) for token in top)
        found.append(TopTokens(request_id, None, candidates, "before penalties and temperature"))
    return as_dictionaries(found, decode)


def as_dictionaries(found: Iterable[TopTokens], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Most likely tokens with their texts, for a view."""
    return [msgspec.to_builtins(top.with_texts(decode)) for top in found]


def _chunk_words(chunk: Any, block_size: int) -> str:
    """A chunk, and the blocks that it appended: those found in the prefix cache, and new ones."""
    num_found = chunk.num_cached_tokens // block_size
    found, new = chunk.new_block_ids[:num_found], chunk.new_block_ids[num_found:]
    tokens = f"tokens [{chunk.start}, {chunk.start + chunk.num_tokens})"
    parts = [tokens, role_of(chunk.arm), limit_of(chunk.limited_by)]
    parts += [f"blocks found in the prefix cache {_values(found)}"] if found else []
    return ", ".join([*parts, *([f"new blocks {_values(new)}"] if new else [])])


def _describe_layer(name: str, capture: Any) -> dict[str, Any]:
    norms = {key: np.linalg.norm(getattr(capture, key), axis=-1) for key in LAYER_ARRAYS}
    facts = [
        (key, f"{_shape(getattr(capture, key))}norm {_range(norm)}; {_not_finite(getattr(capture, key))}")
        for key, norm in norms.items()
    ]
    window = f"a sliding window of {capture.window} tokens" if capture.window > 0 else "the whole context"
    facts.append(
        ("reads", f"{window} of {counted(len(capture.seqused_k), 'sequence')}, KV lengths {_values(capture.seqused_k)}")
    )
    facts.append(("pictures", "the norm of each head (down) of each packed row (across); a stronger colour is larger"))
    return {
        "name": name,
        "what": "attention has written the keys and values of this step and read the context; the rest of the layer "
        "has not been computed",
        "facts": facts,
        "layer": capture.layer,
        "norms": {key: _norm_picture(norm) | {"what": LAYER_ARRAYS[key]} for key, norm in norms.items()},
    }


def _norm_picture(norms: np.ndarray) -> dict[str, Any]:
    """Norms [T, heads] for a view: their marks, with the shades as base64 of uint8 [heads, columns]."""
    marks = norm_marks(norms)
    heads, columns = marks.shades.shape
    return {
        "num_rows": marks.num_rows,
        "heads": heads,
        "columns": columns,
        "least": marks.least,
        "most": marks.most,
        "picture": base64.b64encode(np.ascontiguousarray(marks.shades).tobytes()).decode("ascii"),
    }


def _range(values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "none is finite"
    return f"{finite.min():.3g} to {finite.max():.3g}, mean {finite.mean():.3g}"


def _not_finite(values: np.ndarray) -> str:
    count = int(np.count_nonzero(~np.isfinite(values)))
    return f"{count} of {values.size} numbers are NaN or infinite" if count else "every number is finite"


def _attributes(result: Any) -> dict[str, Any]:
    names = getattr(type(result), "__dataclass_fields__", None) or getattr(result, "__dict__", {})
    return {name: getattr(result, name) for name in names}


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{getattr(value, 'dtype', '')} [{', '.join(map(str, shape))}]: " if shape is not None else ""


def _values(value: Any) -> str:
    flat = value.ravel().tolist() if hasattr(value, "ravel") else list(value)
    shown = " ".join(str(item) for item in flat[:MOST_VALUES])
    return shown + (f" … {len(flat)} in all" if len(flat) > MOST_VALUES else "")

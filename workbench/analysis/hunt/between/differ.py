"""The first step in which two schedules of one workload differ, and the kind of the difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from workbench.base.text import counted

Step = Mapping[str, Any]

KINDS = {
    "refusal": "one side refuses the workload",
    "crash": "one side ends in an exception",
    "progress": "on one side requests wait forever",
    "finish": "a request ends in another step, or for another reason",
    "preemption": "one side preempts, the other does not",
    "preemption victim": "both preempt, and another request or in another order",
    "admission": "another request is admitted or resumed",
    "prefix hit": "an admitted request finds other tokens in the prefix cache, or later ones can: other blocks can be "
    "found from this step on",
    "running request": "a running request gets a chunk on one side only",
    "asynchronous placeholders": "a running request gets a chunk on one side only, or starts elsewhere, while an "
    "output is in flight",
    "order": "the same chunks in another order",
    "drafts": "a chunk has another number of drafts",
    "chunk size": "a chunk has another number of tokens",
    "window": "another block of a sliding window is held or given back",
    "state": "the blocks of a recurrent layer differ",
    "block count": "a request holds another number of blocks",
    "block order": "the same number of blocks, and others of them",
    "blocks freed": "the same tables, and another number of free blocks",
}
"""The kinds of a difference, from the first that is looked for to the last."""


class Difference(NamedTuple):
    """The first difference of two schedules.

    Attributes:
        kind: One of KINDS.
        step: Index of the step.
        message: The two sides.
        request_id: The request concerned; "" for none.
        is_quiet: Only blocks differ; the same chunks run.
    """

    kind: str
    step: int
    message: str
    request_id: str = ""
    is_quiet: bool = False


def difference(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> Difference | None:
    """The first difference of two schedules; None if they are equal.

    Args:
        a: ``{"steps", "end"}`` of one side.
        b: The same of the other.
        config: The workload's configuration.
    """
    return next(_differences(a, b, config), None)


def consequence(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The kind of the first difference that is not of blocks alone, if the first of all is; otherwise ""."""
    found = _differences(a, b, config)
    first = next(found, None)
    if first is None or not first.is_quiet:
        return ""
    return next((each.kind for each in found if not each.is_quiet), "")


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Difference]:
    """The difference of each step that has one, and that of the ends."""
    for index, pair in enumerate(zip(a["steps"], b["steps"])):
        if pair[0] != pair[1] and (each := _of_steps(index, _told_by_both(*pair), (a, b), config)) is not None:
            yield each
    if (found := _of_ends(a, b)) is not None:
        yield found


def _told_by_both(one: Step, other: Step) -> tuple[Step, Step]:
    """The fields of a step that both sides tell; one that either leaves out, here or always, is not compared."""
    shared = [name for name in one if one[name] is not None and other.get(name) is not None]
    chunks = [*one["chunks"], *other["chunks"]]
    known = set.intersection(*map(set, chunks)) if chunks else set()
    sides = []
    for step in (one, other):
        told = {"hits": {}, "preempted": [], "finished": {}, "blocks": {}} | {name: step[name] for name in shared}
        told["chunks"] = [{name: value for name, value in chunk.items() if name in known} for chunk in step["chunks"]]
        sides.append(told)
    return sides[0], sides[1]


def _of_ends(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference | None:
    ends = [side["end"].partition(":")[0] for side in (a, b)]
    step = min(len(a["steps"]), len(b["steps"]))
    rest = max(a["steps"], b["steps"], key=len)[step:]
    if ends[0] == ends[1] and (not rest or (ends[0] == "stuck" and not any(each["chunks"] for each in rest))):
        return None  # a run that waits forever may be given up sooner
    for word, kind in (("refused", "refusal"), ("crash", "crash"), ("stuck", "progress"), ("max_steps", "progress")):
        if (word in ends and ends[0] != ends[1]) or ends == [word, word]:
            return Difference(kind, step, f"A: {a['end']}; B: {b['end']}")
    return Difference("progress", step, f"A takes {counted(len(a['steps']), 'step')}, B {len(b['steps'])}")


def _of_steps(
    index: int, pair: tuple[Step, Step], sides: tuple[Mapping[str, Any], Mapping[str, Any]], config: Mapping[str, Any]
) -> Difference | None:
    a, b = pair
    for look in (_preemptions, _chunks, _tables):
        if (found := look(a, b, config)) is not None:
            return found._replace(step=index)
    crashed = [side["end"].startswith("crash") and index == len(side["steps"]) - 1 for side in sides]
    if crashed[0] != crashed[1]:  # while the output of this step came in
        return Difference("crash", index, f"A: {sides[0]['end']}; B: {sides[1]['end']}")
    if a["finished"] != b["finished"]:
        names = [
            name for name in (*a["finished"], *b["finished"]) if a["finished"].get(name) != b["finished"].get(name)
        ]
        told = [", ".join(f"{name} ({why})" for name, why in side["finished"].items()) or "nobody" for side in (a, b)]
        return Difference("finish", index, f"A ends {told[0]}; B ends {told[1]}", names[0] if names else "")
    if a.get("free_blocks") != b.get("free_blocks"):
        message = f"A has {counted(a['free_blocks'], 'free block')}, B {b['free_blocks']}"
        return Difference("blocks freed", index, message, is_quiet=True)
    known = [set(side.get("cached", ())) for side in (a, b)]
    if known[0] == known[1]:
        return None  # they differ in what one of them leaves out
    alone = [_blocks(sorted(known[side] - known[1 - side])) for side in (0, 1)]
    message = f"blocks that can be found in the prefix cache: {alone[0]} only in A, {alone[1]} only in B"
    return Difference("prefix hit", index, message, is_quiet=True)


def _preemptions(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> Difference | None:
    one, other = a["preempted"], b["preempted"]
    if one == other:
        return None
    kind = "preemption victim" if len(one) == len(other) else "preemption"
    first = next((name for name in (*one, *other) if name not in one or name not in other), (*one, *other)[0])
    return Difference(kind, 0, f"A preempts {_listed(one)}; B preempts {_listed(other)}", first)


def _chunks(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> Difference | None:
    """The first chunk that differs, in the order of scheduling: what comes behind it may follow from it."""
    hits = a["hits"], b["hits"]
    for one, other in zip_longest(a["chunks"], b["chunks"]):
        if one == other and hits[0].get(one["id"]) == hits[1].get(one["id"]):
            continue
        if one is None or other is None or one["id"] != other["id"]:
            return _who(a, b, one, other, bool(config.get("async_scheduling")))
        found = [side.get(one["id"]) for side in hits]
        return _how(one, other, found[0], found[1], bool(config.get("async_scheduling")))
    return None


def _who(a: Mapping[str, Any], b: Mapping[str, Any], one: Any, other: Any, is_async: bool) -> Difference:
    """Another request has the next chunk, or none has."""
    names = [[chunk["id"] for chunk in side["chunks"]] for side in (a, b)]
    if sorted(names[0]) == sorted(names[1]):
        return Difference("order", 0, f"A: {_listed(names[0])}; B: {_listed(names[1])}", one["id"])
    alone = [
        chunk["id"] for chunk, others in ((one, names[1]), (other, names[0])) if chunk and chunk["id"] not in others
    ]
    first = (alone or [chunk["id"] for chunk in (one, other) if chunk])[0]
    if first in a["hits"] or first in b["hits"]:
        return Difference("admission", 0, f"A admits {_listed(a['hits'])}; B admits {_listed(b['hits'])}", first)
    kind = "asynchronous placeholders" if is_async else "running request"
    told = [_listed(name for name in names[side] if name not in names[1 - side]) for side in (0, 1)]
    return Difference(kind, 0, f"A has chunks of {told[0]}; B of {told[1]}", first)


def _how(one: Any, other: Any, hit: int | None, other_hit: int | None, is_async: bool) -> Difference:
    """The same request has another chunk."""
    name = one["id"]
    if (hit is None) != (other_hit is None):
        admitted = [name if each is not None else "nobody" for each in (hit, other_hit)]
        return Difference("admission", 0, f"A admits {admitted[0]}; B admits {admitted[1]}", name)
    if hit != other_hit:
        return Difference("prefix hit", 0, f"{name} has {hit} tokens already in A, {other_hit} in B", name)
    for field, kind, words in (
        ("start", "asynchronous placeholders" if is_async else "chunk size", "starts at"),
        ("num_drafts", "drafts", "drafts:"),
    ):
        if one.get(field) != other.get(field):  # not told by both: equal
            told = f"the chunk of {name}, {words} {one[field]} in A, {other[field]} in B"
            return Difference(kind, 0, told, name)
    told = f"the chunk of {name}, tokens: {one['num_tokens']} in A, {other['num_tokens']} in B"
    return Difference("chunk size", 0, told, name)


def _tables(a: Mapping[str, Any], b: Mapping[str, Any], config: Mapping[str, Any]) -> Difference | None:
    groups = [*(config.get("kv_cache_groups") or ())]
    for name, tables in a["blocks"].items():
        others = b["blocks"].get(name, tables)
        for index, (one, other) in enumerate(zip(tables, others)):
            group = groups[index] if index < len(groups) else {"kind": "full_attention"}
            if one == other:
                continue
            message = f"the table of {name} in group {index}: {_blocks(one)} in A, {_blocks(other)} in B"
            size = group.get("block_size") or config.get("block_size", 16)
            place = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
            if group["kind"] == "mamba":
                kind = "state"
            elif [not block for block in one[: len(other)]] != [not block for block in other[: len(one)]]:
                kind = "window"
            elif place * size < a["hits"].get(name, 0):
                kind = "prefix hit"
            else:
                kind = "block order" if len(one) == len(other) else "block count"
            return Difference(kind, 0, message, name, is_quiet=True)
        if len(tables) != len(others):
            message = f"{name} has {counted(len(tables), 'block table')} in A, {len(others)} in B"
            return Difference("block count", 0, message, name, is_quiet=True)
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nobody"


def _blocks(table: Sequence[int]) -> str:
    shown = " ".join(map(str, table[:12]))
    return f"[{shown}{' ...' if len(table) > 12 else ''}]"

"""Read the lines of trace files of versions 1 to 3 as lines of the present version.

Up to version 3 a reason was the scheduler's sentence, which can contain names of requests, and a name can read like a
sentence. Facts are taken from a sentence only if the names in it are the step's and it can be read in one way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from workbench.trace.assumed_pool import AssumedPool
from workbench.trace.checks import groups_of
from workbench.trace.fields import EMPTY
from workbench.trace.lines import SCHEMA_VERSION, Keyframe, RequestInfo, Supplement, TraceEnd, TraceLine, TraceMeta
from workbench.trace.reasons import Reason, Rule
from workbench.trace.records import StepRecord
from workbench.trace.step_span import with_span

_MAX_READINGS = 16
"""Places at which a sentence about a preemption is split on trial, so that no name makes a file slow to read."""


class OldStepRecord(StepRecord, frozen=True, omit_defaults=True, dict=True, tag="step", tag_field="kind"):
    """A step whose reasons are sentences."""

    waiting_reason: str = ""  # type: ignore[assignment]
    passed_over: Mapping[str, str] = EMPTY  # type: ignore[assignment]
    preempt_reasons: Mapping[str, str] = EMPTY  # type: ignore[assignment]


OldTraceLine = TraceMeta | RequestInfo | Keyframe | OldStepRecord | Supplement | TraceEnd
"""The types of a line of versions 1 to 3."""


class OldLines:
    """Converts the lines of one file in order.

    Args:
        version: The version of its format.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._config: Mapping[str, Any] = EMPTY
        self._pool = AssumedPool(())
        self._previous_end = 0.0

    def convert(self, line: OldTraceLine) -> list[TraceLine]:
        """The lines of the present version that a line becomes.

        Raises:
            TraceError: The first line has a configuration of KV cache groups that makes no sense.
        """
        if isinstance(line, TraceMeta):
            self._config, self._pool = line.config, AssumedPool(groups_of(line))
            return [replace(line, schema_version=SCHEMA_VERSION)]
        if isinstance(line, Keyframe):
            self._pool.start_from(line)
        if not isinstance(line, OldStepRecord):
            return [line]
        record = with_span(self._pool.complete(self._with_facts(line)), self._previous_end)
        self._previous_end = record.end
        return [record] if self._version > 1 else _without_shadow(record)

    def _with_facts(self, old: OldStepRecord) -> StepRecord:
        values = {name: getattr(old, name) for name in StepRecord.__struct_fields__}
        running = {*old.running, *old.preempted, *(chunk.request_id for chunk in old.chunks)}
        reasons = {rid: self._of_preemption(text, running) for rid, text in old.preempt_reasons.items()}
        passed_over: dict[str, Reason] = {}
        for request_id, text in old.passed_over.items():
            why = old.preempt_reasons.get(request_id)
            if why is not None and text == f"preempted in this step: {why}":
                passed_over[request_id] = reasons[request_id].as_preempted()
            else:
                passed_over[request_id] = _only(text, self._of_admission(text, old))
        values |= {"preempt_reasons": reasons, "passed_over": passed_over}
        values["waiting_reason"] = self._of_others(old.waiting_reason, old, reasons) if old.waiting_reason else None
        return StepRecord(**values)

    def _of_preemption(self, text: str, running: Collection[str]) -> Reason:
        """The facts of a sentence such as "a needs 1 more KV block, 0 free; last admitted"."""
        if text == "the prefix cache was reset":
            return Reason("preempted", rule="cache_reset")
        if text == "the KV blocks ran out":
            return self._blocks(None, None)
        found = []
        for index, match in enumerate(_NEEDS.finditer(text)):
            request_id, chosen = text[: match.start()], text[match.end() :]
            if index == _MAX_READINGS:
                return Reason(text=text)
            if request_id not in running:
                continue
            priority, by, rule = None, "", ""
            if chosen == "last admitted":
                rule = "last_admitted"
            elif by_priority := _PRIORITY.fullmatch(chosen):
                rule, priority = "priority", int(by_priority[1])
            elif chosen.startswith("chosen by "):
                rule, by = "policy", chosen.removeprefix("chosen by ")
            else:
                continue
            facts = self._blocks(int(match[1]), int(match[2]))
            found.append(replace(facts, rule=rule, requests=(request_id,), priority=priority, text=by))
        return _only(text, found)

    def _of_others(self, text: str, step: OldStepRecord, preemptions: Mapping[str, Reason]) -> Reason:
        """The facts of the sentence about the waiting requests that are not in ``passed_over``."""
        if step.preempted and text == f"{', '.join(step.preempted)} preempted in this step: nobody is admitted":
            facts = next(reversed(list(preemptions.values())), self._blocks(None, None))
            if facts.kind == "kv_blocks":
                return replace(facts, rule="preemption", requests=step.preempted)
            return facts
        found = list(self._of_admission(text, step))
        for request_id in step.waiting:
            if text.startswith(beginning := f"waiting behind {request_id}: "):
                for facts in self._of_admission(text.removeprefix(beginning), step):
                    if facts.rule != "long_prompt":  # nobody waits behind one that may be overtaken
                        found.append(facts.for_those_behind(request_id))
        return _only(text, found)

    def _of_admission(self, text: str, step: OldStepRecord) -> Iterator[Reason]:
        """The facts of a sentence about a waiting request, none if it is not one of the scheduler's."""
        if (facts := _SENTENCES.get(text)) is not None:
            yield replace(facts, value=facts.value or self._number(facts.limit))
        elif match := _BUDGET.fullmatch(text):
            yield self._budget(None, int(match[2]) - int(match[1]))
        elif match := _TOKENS.fullmatch(text):
            rule: Rule = "whole_prompt" if match[2] == "in one step" else "padding_drafts"
            yield replace(self._budget(int(match[1]), int(match[3])), rule=rule)
        elif match := _SEATS.fullmatch(text):
            if len(step.running) >= int(match[2]):  # otherwise it was what remained when nothing else was known
                yield Reason("seats", match[1], int(match[2]), 1, 0)
        elif match := _BLOCKS.fullmatch(text):
            reserved = min(int(match[4] or 0), int(match[3]))
            facts = self._blocks(int(match[1]), int(match[3]) - reserved)
            yield replace(facts, num_tokens=int(match[2]), reserved=reserved)
        elif match := _NUM_PARTIAL.fullmatch(text):
            yield Reason("partial_prefills", "max_num_partial_prefills", int(match[1]), 1, 0)
        elif match := _LONG_PARTIAL.fullmatch(text):
            names = tuple(match[2].split(", "))
            facts = Reason("partial_prefills", "max_long_partial_prefills", int(match[1]), 1, 0, rule="long_prompt")
            known = set(names).issubset(step.running)
            yield replace(facts, requests=names) if known else replace(facts, text=match[2])
        elif match := _NOT_ADMITTED.fullmatch(text):
            yield Reason() if int(match[1]) else self._blocks(None, 0)

    def _budget(self, needed: int | None, available: int) -> Reason:
        names = ("max_num_scheduled_tokens", "max_num_batched_tokens")
        limit = next((name for name in names if isinstance(self._config.get(name), int)), names[1])
        return Reason("token_budget", limit, self._number(limit), needed, available)

    def _blocks(self, needed: int | None, available: int | None) -> Reason:
        return Reason("kv_blocks", "num_blocks", self._number("num_blocks"), needed, available)

    def _number(self, name: str) -> int | None:
        value = self._config.get(name)
        return value if isinstance(value, int) else None


def _only(text: str, found: Collection[Reason] | Iterator[Reason]) -> Reason:
    """The only reading of a sentence; if there is none, or several, the sentence alone."""
    readings = set(found)
    return readings.pop() if len(readings) == 1 else Reason(text=text)


_N = "([0-9]{1,15})"
_BUDGET = re.compile(rf"token budget used up \({_N} of {_N}\)")
_TOKENS = re.compile(rf"{_N} tokens (in one step|with padding drafts), {_N} of the token budget left")
_SEATS = re.compile(rf"(max_num_seqs|max_num_active_seqs) reached \({_N}\)")
_BLOCKS = re.compile(
    rf"no free KV blocks: needs {_N} for {_N} tokens, {_N} free(?:, {_N} of them kept by the watermark)?"
)
_NUM_PARTIAL = re.compile(rf"max_num_partial_prefills \({_N}\) in progress")
_LONG_PARTIAL = re.compile(rf"(?s)long prompt: max_long_partial_prefills \({_N}\) in progress, (.*)")
_NOT_ADMITTED = re.compile(rf"not admitted by the engine, with {_N} KV blocks free")
_NEEDS = re.compile(rf" needs {_N} more KV blocks?, {_N} free; ")
_PRIORITY = re.compile(r"lowest priority \((-?[0-9]{1,15})\)")
_SENTENCES = {
    str(reason): reason
    for reason in (
        Reason("output_in_flight", "async_scheduling", True),
        Reason("state_boundary"),
        Reason("state_boundary", rule="same_step"),
        Reason("partial_prefills", "max_long_partial_prefills", rule="overtaken"),
    )
}


def _without_shadow(record: StepRecord) -> list[TraceLine]:
    """A record of version 1, which kept the result of a shadow launch in its kernel details.

    It was "pending" until it was known.
    """
    if record.kernel is None or "shadow" not in record.kernel.details:
        return [record]
    details = dict(record.kernel.details)
    found = details.pop("shadow")
    record = replace(record, kernel=replace(record.kernel, details=details))
    if not isinstance(found, dict) or found.get("pending"):
        return [record]
    return [record, Supplement(record.step, "shadow", found)]

"""The turns of a conversation in ShareGPT's form: the first question and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.field_checks import FieldError, choice
from workbench.base.key_table import RowCheck
from workbench.base.text import shown
from workbench.simulation.log_tables import ANSWERS, QUESTIONS, TURN_RULES


def first_exchange(place: str, turns: Any, columns: RowCheck) -> tuple[str, str] | None:
    """All that stands before the first answer, and this answer; None if there is no question with an answer.

    Args:
        place: The conversation, for messages.
        turns: Its turns, ``{"from": "human" or "gpt", "value": text}``; if none says whose it is, they alternate.
        columns: Checks the keys of a turn.

    Raises:
        ValueError: A turn is malformed, or says that it is somebody's who is unknown.
    """
    if not isinstance(turns, list):
        raise FieldError(f"{place} conversations must be a list, got {shown(turns)}")
    question = ""
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise FieldError(f"{place} conversations[{index}] must be an object, got {shown(turn)}")
        turn = columns.check(f"{place} conversations[{index}]", turn, TURN_RULES)
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise FieldError(f"{place} conversations[{index}] must have a text, got {shown(text)}")
        if role is None:
            role = ANSWERS[0] if question else QUESTIONS[0]
        if choice(f"{place} conversations[{index}].from", role, (*QUESTIONS, *ANSWERS)) in QUESTIONS:
            question += text
        elif question:
            return question, text
    return None

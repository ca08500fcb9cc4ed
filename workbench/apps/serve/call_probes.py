"""The form of calls, learned from a chat template: made-up calls are rendered, and the text around them is read.

Three calls with the same arguments show what stands around a name, between calls and behind the last one. If arguments
are not a JSON object, calls with arguments of other kinds show how each is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, TypeVar

from workbench.apps.serve.call_parts import ID, INDEX, LLAMA, CallText, Pairs
from workbench.apps.serve.given_tools import MADE_UP, given
from workbench.models.tokenizer import ChatTemplateError, Tokenizer

_NAMES = ("NAME_OF_A_CALL", "NAME_OF_ANOTHER", "NAME_OF_A_THIRD")
_KEY, _KEY_2, _VALUE, _VALUE_2 = "KEY_OF_A_CALL", "OTHER_KEY_OF_A_CALL", "VALUE_OF_A_CALL", "OTHER_VALUE_OF_A_CALL"
_CONTENT = "CONTENT_OF_AN_ANSWER"
_NUMBER, _MARKUP = 271828, "<a>&b\nc"
_ONE = {_KEY: _VALUE}
_PYTHON = {"True": True, "None": None}
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}')
_MARK = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\]|<[^<>]{1,40}$")
_TAG = re.compile(r"<[^<>\s]{1,40}>")
_WORDS = re.compile(r"[a-zA-Z][^<>{}\[\]]{3,40}\[")
_THOUGHT = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
_USER: dict[str, Any] = {"role": "user", "content": "a"}
_Form = TypeVar("_Form", bound=CallText)
_UNKNOWN = "tools: the model's chat template writes calls in a form that is not known: "


def _common(texts: Sequence[str]) -> str:
    """The common beginning of texts."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _shared(*texts: str) -> str:
    """The common beginning of texts, without a tag that is not complete."""
    return re.sub(r"<[^<>]*$", "", _common(texts))


def _indexed(texts: Sequence[str]) -> str:
    """The text that several are, but for one number that counts calls.

    Raises:
        ValueError: They differ by more.
    """
    if len(set(texts)) <= 1:
        return texts[0] if texts else ""
    before = _common(texts)
    numbers = [re.match(r"(\d+)(.*)", text[len(before) :], re.DOTALL) for text in texts]
    found = [(int(number[1]), number[2]) for number in numbers if number is not None]
    first, after = found[0] if found else (0, "")
    if found != [(first + i, after) for i in range(len(texts))]:
        raise ValueError(f"{_UNKNOWN}the text around a call depends on the call")
    return before + INDEX + after


class _Probes:
    """A template, asked for made-up conversations."""

    def __init__(self, tokenizer: Tokenizer, *, in_id: bool = False) -> None:
        self._tokenizer, self.in_id = tokenizer, in_id
        self._tools = given(tokenizer, MADE_UP)
        self.shown = tokenizer.apply_chat_template([_USER], **self._tools)
        answer = {"role": "assistant", "content": _CONTENT}
        text = tokenizer.apply_chat_template([_USER, answer], add_generation_prompt=False, **self._tools)
        self.end = text.partition(_CONTENT)[2]
        self.answered = text[len(_shared(self.shown, text)) :]
        eos = (tokenizer.decode([token]) for token in sorted(tokenizer.eos_token_ids))
        self._eos = [text for text in eos if text.strip()]

    def written(self, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
        """A conversation whose last answer has some calls."""
        made = [
            {
                "id": f"functions.{n}:{i}" if self.in_id else ID,
                "type": "function",
                "function": {"name": n, "arguments": a},
            }
            for i, (n, a) in enumerate(calls)
        ]
        messages = [_USER, {"role": "assistant", "content": content, "tool_calls": made}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=False, **self._tools)

    def after(self, arguments: dict[str, Any]) -> str:
        """The text behind the name of the only call."""
        return self.ended(self.written((_NAMES[0], arguments)).partition(_NAMES[0])[2])

    def ended(self, text: str) -> str:
        """A text without what ends an answer."""
        text = text.removesuffix(self.end)
        for end in (*_TAG.findall(self.end), self.end.strip(), *self._eos):
            text = text.partition(end)[0] if end else text
        return text

    def lead(self, text: str, names: Sequence[str]) -> str:
        """The text with which an answer begins that has only calls, up to the first name."""
        lead = text.partition(names[0])[0]
        if lead.startswith(self.shown):
            return _THOUGHT.sub("", lead.removeprefix(self.shown), count=1).lstrip()
        try:
            said, content, found = self.written(*((n, _ONE) for n in names), content=_CONTENT).partition(_CONTENT)
        except ChatTemplateError:
            said, content, found = "", "", ""
        found = found.partition(names[0])[0].lstrip()
        mark = _MARK.match(found)
        if content and names[0] not in said and (mark is None or mark[0] not in self.end):
            return found
        return _THOUGHT.sub("", lead[len(_shared(self.shown, lead)) :], count=1).lstrip()

    def mark(self, lead: str) -> str:
        """The beginning of a lead that no other answer has: a tag, tags, or words and a bracket.

        Raises:
            ValueError: There is none.
        """
        marks = [lead[: found.end()] for found in _TAG.finditer(lead) if _MARK.match(lead)]
        if found := _MARK.match(lead):
            marks.insert(0, found[0])
        elif found := _WORDS.match(lead):
            marks = [found[0]]
        if not marks:
            raise ValueError(f"{_UNKNOWN}a call begins with {lead[:40]!r}, which is not a tag")
        own = next((mark for mark in marks if mark not in self.answered), "")
        if not own or any(eos in own for eos in self._eos):
            raise ValueError(f"{_UNKNOWN}a call begins with {marks[0]!r}, which also ends an answer")
        lead_of_answers = self.answered.partition(_CONTENT)[0].strip()
        if lead_of_answers and own.startswith(lead_of_answers):
            raise ValueError(f"{_UNKNOWN}answers stand between tags, which are not separated from their text")
        return own


def learn(kind: type[_Form], tokenizer: Tokenizer) -> _Form:
    """The form in which a model's template writes calls.

    Raises:
        ValueError: The template shows no calls, or writes them in a form that cannot be learned.
    """
    try:
        probes = _Probes(tokenizer)
        text = _calls_of(probes)
        if _NAMES[0] not in text:  # as Kimi K2, whose ids name the function
            probes = _Probes(tokenizer, in_id=True)
            text = _calls_of(probes)
        return _learn(kind, probes, text)
    except ChatTemplateError as problem:
        raise ValueError(f"tools: {problem}") from None


def shown_tools(tokenizer: Tokenizer) -> str:
    """A prompt with a made-up tool."""
    return tokenizer.apply_chat_template([_USER], **given(tokenizer, MADE_UP))


def shows_calls(tokenizer: Tokenizer) -> bool:
    """Whether a template shows the calls of earlier answers."""
    return _KEY in _Probes(tokenizer).written((_NAMES[0], _ONE))


def _calls_of(probes: _Probes) -> str:
    try:
        return probes.written(*((name, _ONE) for name in _NAMES))
    except ChatTemplateError:  # one call in an answer, as with Llama 3
        return probes.written((_NAMES[0], _ONE))


def _learn(kind: type[_Form], probes: _Probes, text: str) -> _Form:
    names = _NAMES if all(name in text for name in _NAMES) else _NAMES[:1]
    if names[0] not in text:
        raise ValueError("tools: the model's chat template leaves out the calls of earlier answers, or their names")
    ends = [*(text.find(name) for name in names[1:]), len(text)]
    parts = [text[text.find(name) + len(name) : end] for name, end in zip(names, ends, strict=True)]
    found = [_ARGUMENTS.search(part) for part in parts]
    if in_pairs := found[0] is None:
        found = [re.search(f"{_KEY}.*?{_VALUE}", part, re.DOTALL) for part in parts]
    if None in found:
        raise ValueError(f"{_UNKNOWN}the arguments do not stand behind the name")
    spans = [match.span() for match in found if match is not None]
    between = _indexed([part[:start] for part, (start, _) in zip(parts, spans, strict=True)])
    rests = [part[end:] for part, (_, end) in zip(parts, spans, strict=True)]
    last = probes.ended(rests.pop())
    closing = (_shared(last, *rests) if rests else last).rstrip()
    more = _indexed([rest[len(closing) :] for rest in rests]) if rests else None
    lead = probes.lead(text, names)
    if more is not None and INDEX in more:
        after = more.rsplit(INDEX, 1)[1]
        lead = re.sub(rf"\d+{re.escape(after)}$", lambda _: INDEX + after, lead)
    mark = "" if lead.startswith("{") else probes.mark(lead)
    opening = lead.removeprefix(mark)
    gapped = mark != "" and more is not None and more.endswith(lead)
    form = kind(
        mark=mark or LLAMA,
        opening=opening,
        between=between,
        closing=closing,
        more=more or None,
        end="" if gapped or more is None else last[len(closing) :].rstrip(),
        leads=not mark,
        in_id=probes.in_id,
        answer_end=probes.end.strip() if mark and mark.startswith(probes.end.strip() or "\0") else "",
        pairs=_pairs(probes, parts[0], closing, more) if in_pairs else None,
    )
    if any(probe in form.marks for probe in (*_NAMES, _KEY, _VALUE, _CONTENT, str(_NUMBER))):
        raise ValueError(f"{_UNKNOWN}its name or its arguments are repeated")
    if re.match(r"[a-zA-Z0-9_.-]|$", form.between):
        raise ValueError(f"{_UNKNOWN}nothing ends the name")
    return form


def _pairs(probes: _Probes, part: str, closing: str, more: str | None) -> Pairs:
    """The writing of arguments that stand one by one."""
    string_open = part.partition(_KEY)[2].partition(_VALUE)[0]
    middle = probes.after({_KEY: _VALUE, _KEY_2: _VALUE_2}).partition(_VALUE)[2].partition(_KEY_2)[0]
    close = _shared(middle, closing) or _common((middle, closing))
    close = close[: close.find(">") + 1] or (close[0] if close[:1] in ("'", '"') else close)
    if not (middle and close.strip("<") and string_open):
        raise ValueError(f"{_UNKNOWN}the end of an argument cannot be told")
    separator, final = middle[len(close) :], closing[len(close) :]
    other_open, _, rest = probes.after({_KEY: _NUMBER, _KEY_2: _VALUE}).partition(_KEY)[2].partition(str(_NUMBER))
    other_close, found, _ = rest.partition(_KEY_2)
    if not found or not other_close.endswith(separator):
        raise ValueError(f"{_UNKNOWN}numbers are written unlike strings")
    other_close = other_close.removesuffix(separator)
    begin, found, rest = probes.after({_KEY: _MARKUP}).partition(_KEY)[2][len(string_open) :].partition(_MARKUP)
    end = rest.partition(close)[0]
    if not found or bool(begin) != bool(end):
        raise ValueError(f"{_UNKNOWN}strings with markup are written unlike others")
    nested = probes.after({_KEY: {_KEY_2: [_VALUE]}}).partition(_KEY)[2]
    kinds = {  # JSON, which models are also taught to write where a template writes Python
        re.escape(other_open) + rf'\{{["\']{_KEY_2}["\']: ?\[["\']{_VALUE}["\']\]\}}': False,
        re.escape(f"{other_open}{{{_KEY_2}:[{close}{_VALUE}{close}]}}"): True,
    }
    own = next((own for pattern, own in kinds.items() if re.match(pattern, nested)), None)
    if own is None:
        raise ValueError(f"{_UNKNOWN}objects as arguments are written neither as JSON nor as the arguments are")
    empty = probes.written(*((name, {}) for name in (_NAMES[:2] if more else _NAMES[:1])))
    empty = probes.ended(empty.partition(_NAMES[0])[2].partition(_NAMES[1])[0])
    if more:
        number = re.escape(more).replace(INDEX, r"\d+")
        empty, ended = re.subn(number + "$", "", empty)
        if not ended:
            raise ValueError(f"{_UNKNOWN}calls without arguments end unlike others")
    written = {word: probes.after({_KEY: value}).partition(_KEY)[2] for word, value in _PYTHON.items()}
    words = any(text.startswith(other_open + word) for word, text in written.items())
    wrap = (begin, end) if begin else None
    return Pairs(empty.rstrip(), string_open, close, other_open, other_close, separator, final, own, words, wrap)

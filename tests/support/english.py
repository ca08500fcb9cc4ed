"""Find phrases that read translated, in the prose of a file: docstrings, comments, messages, pages, notebook cells."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_START = r"(?:\A\s*|(?<=[.:;!?]\s)\s*|\n\s*\n\s*)"
_QUESTION_WORDS = (
    "Who",
    "Whoever",
    "Whose",
    "Whom",
    "What",
    "Whatever",
    "Which",
    "Whichever",
    "Where",
    "Wherever",
    "How",
)
_QUESTION_WORD = rf"(?:{'|'.join(_QUESTION_WORDS)}|However (?:many|much|long))\b(?!-)"
_STATEMENT = r"[^?!.]*(?:\.\w[^?!.]*)*\."

PATTERNS = {
    "opens_with_a_question_word": rf"{_START}{_QUESTION_WORD}{_STATEMENT}",
    "where_for_if": r"\bwhere (?:there (?:is|are|was|were)|nothing|none|no one)\b"
    r"|\b(?:None|none|empty|absent|nothing|\"\"|``\"\"``) where\b",
    "who_is_nobody": r"\b(?:by|for|from|of|to|with|tells?|lets?|refuses?) who\b|\b[Ww]hoever\b",
    "at_most_as_a_noun": r"(?<![<>=]) at (?:most|least)(?=\s*(?:[.;:)]|\Z))",
    "than_there_is": r"\bthan there (?:is|are|was|were)\b",
    "goes_on": r"\b(?:go|goes|went|gone) on\b",
    "of_its_own": r"\bof (?:its|their|his|her|our|my|your|one's) own\b",
    "under_way": r"\bunder ?way\b",
    "in_words": r"\bin words\b",
    "looks_on": r"\b(?:look|looks|looked|looking) on\b",
    "is_through_with": r"\b(?:is|are|was|be) through with\b",
    "comes_to_be": r"\b(?:come|comes|came|coming) to be\b",
    "what_it_makes_of": r"\b[Ww]hat (?:it|they|he|she|the \w+) (?:make|makes|made) of\b",
    "be_it": r"(?:\A|\. |, )[Bb]e (?:it|they)\b",
    "anew": r"\banew\b",
    "for_ever": r"\bfor ever\b",
    "is_no_noun": r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|such|need|less|better|worse|one\b)\w+",
    "space_before_percent": r"(?<=[\d}])[ \u00a0\u202f]%(?!\w| ?[\d}]| \w+\()",
    "therein": r"\b(?:there|where|here)(?:in|of|by|upon|with)\b",
}
"""Each pattern by the name it is reported with; tests/data/translated_english.json holds sentences that it finds."""

SUFFIXES = {".py", ".js", ".metal", ".h", ".cpp", ".md", ".ipynb"}
"""Endings of the files that `findings` can read."""

_COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
_JS_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)",
    re.DOTALL,
)
_PY_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)|\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)
"""Comments and strings: a # in a string begins no comment. `tokenize` takes ten times as long."""
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """One phrase that reads translated."""

    path: str
    line: int
    pattern: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern}: {self.text!r}"


def findings(path: Path, name: str) -> list[Finding]:
    """The phrases of a file that read translated, in the order of their lines.

    Args:
        path: A .py, .js, .metal, .h, .cpp, .md or .ipynb file.
        name: The file's name in the findings.
    """
    return [
        Finding(name, line + prose.count("\n", 0, at), pattern, " ".join(phrase.split())[:90])
        for line, prose in prose_of(path)
        for pattern, at, phrase in translated(prose)
    ]


def translated(prose: str) -> Iterator[tuple[str, int, str]]:
    """The patterns in a text, each with the position and the words of the phrase it matches."""
    for name, pattern in _COMPILED.items():
        for match in pattern.finditer(prose):
            leading = len(match.group()) - len(match.group().lstrip())
            yield name, match.start() + leading, match.group()


def prose_of(path: Path) -> list[tuple[int, str]]:
    """The texts of a file that a person reads, each with the number of its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _python(source)
    if path.suffix == ".ipynb":
        return _notebook(source)
    if path.suffix == ".md":
        return _markdown(source)
    return _c_like(source)


def _python(source: str) -> list[tuple[int, str]]:
    texts, lines, line, at = _python_strings(ast.parse(source)), [], 1, 0
    for match in _PY_TOKEN.finditer(source):
        if text := match.group("comment"):
            line, at = line + source.count("\n", at, match.start()), match.start()
            lines.append((line, text.lstrip("#")))
    return sorted([*texts, *_joined(lines)])


def _python_strings(tree: ast.AST) -> list[tuple[int, str]]:
    """String constants and f-strings; an f-string is one text, with {} for each of its values."""
    texts, parts = [], set()
    for node in _nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            values = [str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values]
            texts.append((node.lineno, "".join(values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            texts.append((node.lineno, node.value))
    return [(line, text) for line, text in texts if " " in text.strip()]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, a parent before its children: `ast.walk` in a third of its time."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]


def _joined(comments: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Comments on consecutive lines are one text."""
    blocks: list[tuple[int, str]] = []
    for line, text in comments:
        if blocks and line == blocks[-1][0] + blocks[-1][1].count("\n") + 1:
            blocks[-1] = blocks[-1][0], blocks[-1][1] + "\n" + text
        else:
            blocks.append((line, text))
    return blocks


def _markdown(source: str) -> list[tuple[int, str]]:
    """Paragraphs, list items and rows of tables; headings, bold labels and code blocks are not sentences."""
    without_code = _FENCE.sub(lambda match: "\n" * match.group().count("\n"), source)
    texts: list[tuple[int, str]] = []
    for number, line in enumerate(without_code.split("\n"), 1):
        opens = re.match(r"\s*(?:[-*+] |\d+\. |#|\||<|!!!|$)", line)
        plain = re.sub(r"^\s*(?:[-*+]|\d+\.) ", "", line)
        if line.lstrip().startswith("#"):
            plain = ""
        plain = re.sub(r"\*\*[^*]*[:.?]\*\*", "", plain)
        if opens or not texts:
            texts.append((number, plain))
        else:
            texts[-1] = texts[-1][0], texts[-1][1] + "\n" + plain
    cells = [(line, cell) for line, text in texts for cell in (text.split("|") if text.startswith("|") else [text])]
    return [(line, text) for line, text in cells if text.strip()]


def _notebook(source: str) -> list[tuple[int, str]]:
    """The cells of a notebook; the line is the number of the line in its cell."""
    texts = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        texts += _python(text) if cell["cell_type"] == "code" else _markdown(text)
    return texts


def _c_like(source: str) -> list[tuple[int, str]]:
    comments, texts = [], []
    for match in _JS_TOKEN.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if text := match.group("comment"):
            comments.append((line, re.sub(r"^\s*(?://|/\*+|\*/|\*)|\*/$", "", text, flags=re.MULTILINE)))
        elif " " in (text := match.group("string")):
            texts.append((line, text[1:-1]))
    return sorted([*texts, *_joined(comments)])

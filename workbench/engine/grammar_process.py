"""The process that compiles grammars and computes masks: run as a program by `workbench.engine.grammar_host`.

A grammar comes from a client, and llguidance may need any time and memory for it. So each text gets a process that can
be ended. This program makes the table of the tokenizer once, which takes up to a second, and then forks a child for
each text, in milliseconds. A child compiles its text, tries a few masks, and keeps a matcher for each request with it.

Messages come and go through connections: the first one has the descriptor that is this program's argument, and each
child gets its own. Nothing that a child sends is more than bytes to the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import chain
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workbench.base.resource_limits import limit_resources, memory_in_use
from workbench.engine.grammar_form import first_line, grammar_of

COMPILE_SECONDS = 10.0
"""Processor time that compiling a text may take, the first mask included."""

MASK_SECONDS = 0.25
"""Processor time that a mask may take."""

MAX_MEMORY = 2**30
"""Address space for a grammar besides what the process has when it begins (1 GiB)."""

COMPILE_STACK = 256 << 20
"""Stack of the compiling thread in bytes, of which a grammar uses what it needs: llguidance recurses into references,
and ends the process if its stack is too small. Half of this is enough for the worst grammar of MAX_GRAMMAR_BYTES."""

SHORT_SECONDS = 0.3
"""Processor time from which compiling a text is long work."""

SHORT_NICENESS, LONG_NICENESS = 5, 14
"""Niceness that the compiling thread gets besides that of the process: compiling may take long, and masks may not."""

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=100_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Limits of llguidance. They do not count all work: the time of a row is cubic in its items, and the automaton of
``multipleOf: n`` has about n states. The rest is limited by COMPILE_SECONDS, MASK_SECONDS and MAX_MEMORY."""

WORN_BYTES = 2**25
"""Growth of a child's memory from which new requests get a new child: all matchers of a text share their lexer."""

NUM_TRIED, TRIED_SECONDS = 8, 0.05
"""Number of tokens after which the masks of a new text are tried, and the time from which no more are."""

OK, WORN, FAILED = b"\0", b"\1", b"\2"
"""First byte of an answer."""


class KnownTexts:
    """A vocabulary as LLTokenizer takes it, for a tokenizer that is known by its texts alone.

    A token that is not a whole character counts as special, which no grammar allows.

    Args:
        texts: The bytes of each token; none for those that a grammar never allows.
        end: A token that ends an output.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, texts: Sequence[bytes], end: int) -> None:
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self.tokens = [text or b"<|%d|>" % token for token, text in enumerate(texts)]  # special ones are told by name
        self.eos_token_id = end
        self._ids = {text: token for token, text in reversed(list(enumerate(texts))) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar prescribes, the longest first; up to a byte that no token has."""
        rest, found = text.encode() if isinstance(text, str) else bytes(text), []
        while rest:
            lengths = range(min(len(rest), self._longest), 0, -1)
            length = next((length for length in lengths if rest[:length] in self._ids), 0)
            if not length:
                break
            found.append(self._ids[rest[:length]])
            rest = rest[length:]
        return found


class PlainTexts:
    """A vocabulary as LLTokenizer takes it, whose special tokens are found in no text.

    A grammar that spells the text of a special token means the text: PyPI ``tokenizers`` would find the token in it,
    which llguidance then refuses, or takes for the end of the output. A grammar names a token as ``<token>``.

    Args:
        serialized: The tokenizer in the format of PyPI ``tokenizers``.
        size: Number of logits in a row.
        ends: The tokens that end an output.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, serialized: str, size: int, ends: Sequence[int]) -> None:
        known = LLTokenizer(serialized, n_vocab=size, eos_token=list(ends))
        self.eos_token_id = ends[0]
        self.special_token_ids = [token for token in range(size) if known.is_special_token(token)]
        self.tokens = [known.decode_bytes([token]) for token in range(size)]
        self._plain = LLTokenizer(with_hidden_names(serialized), n_vocab=size, eos_token=list(ends))

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar prescribes."""
        return self._plain.tokenize_bytes(text.encode() if isinstance(text, str) else bytes(text))


def with_hidden_names(serialized: str) -> str:
    """A tokenizer whose special tokens have names that occur in no text; ids stay what they are."""
    content = json.loads(serialized)
    names = {}
    for token in content["added_tokens"]:
        if token["special"]:
            names[token["content"]] = token["content"] = f"\U0010fffd{token['id']}\U0010fffd"  # for private use
    model = content["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(name, name): token for name, token in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(content)


def make_tokenizer(vocabulary: dict[str, Any]) -> LLTokenizer:
    """The table of a model's tokens."""
    size, ends, serialized = vocabulary["size"], vocabulary["ends"], vocabulary["serialized"]
    if serialized is None:
        texts = KnownTexts([text.encode("latin-1") for text in vocabulary["texts"]], ends[0])
        return LLTokenizer(texts, n_vocab=size, eos_token=ends)  # type: ignore[arg-type]
    return LLTokenizer(PlainTexts(serialized, size, ends), n_vocab=size, eos_token=ends)  # type: ignore[arg-type]


class Child:
    """Compiles one text, and then answers for its requests.

    Args:
        connection: To the engine.
        tokenizer: The tokens.
        vocabulary: See `make_tokenizer`.
    """

    def __init__(self, connection: Connection, tokenizer: LLTokenizer, vocabulary: dict[str, Any]) -> None:
        self._connection, self._tokenizer, self._ends = connection, tokenizer, frozenset(vocabulary["ends"])
        self._mask_bytes = -(-vocabulary["size"] // 8)
        self._matcher: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}
        self._memory = 0
        self._num_answers = 0
        self._is_worn = False

    def work(self) -> None:
        """Compile, and answer until the other side ends."""
        kind, text = json.loads(self._connection.recv_bytes())
        begin = threading.Event()
        threading.stack_size(COMPILE_STACK)
        compiling = threading.Thread(target=self._compile, args=(kind, text, begin), daemon=True)
        compiling.start()
        _be_nice(compiling, SHORT_NICENESS)
        memory = memory_in_use()
        limit_resources(MAX_MEMORY)
        _allow(COMPILE_SECONDS)
        begin.set()
        while compiling.is_alive():
            compiling.join(0.05)
            if time.process_time() > SHORT_SECONDS:
                _be_nice(compiling, LONG_NICENESS)
                compiling.join()
        if self._matcher is None:
            return
        self._connection.send_bytes(OK + str(max(0, memory_in_use() - memory)).encode())
        self._memory = memory_in_use()
        while True:
            self._answer(*json.loads(self._connection.recv_bytes()))

    def _compile(self, kind: str, text: str, begin: threading.Event) -> None:
        """Make the matcher. Its first mask takes the longest, and finds out whether there is any output at all."""
        begin.wait()
        try:
            grammar = grammar_of(kind, text)
            problem = LLMatcher.validate_grammar(grammar, limits=LIMITS)
        except (TypeError, ValueError, RecursionError) as refused:
            problem = str(refused) or "it is nested too deeply"
        if problem:
            return self._connection.send_bytes(FAILED + first_line(problem).encode("utf-8", "replace"))
        self._connection.send_bytes(OK)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return self._connection.send_bytes(FAILED + matcher.get_error().encode())
        self._connection.send_bytes(OK)
        if problem := _try_masks(matcher, self._ends):
            return self._connection.send_bytes(FAILED + problem.encode())
        self._matcher = matcher

    def _answer(self, question: str, request: int, tokens: list[int], drafts: list[int]) -> None:
        """Answer a question about one request, after its new tokens.

        Args:
            question: "masks", "valid" or "forget".
            request: Its number.
            tokens: Tokens of its output that are new.
            drafts: Its drafts.
        """
        assert self._matcher is not None
        if question == "forget":
            self._matchers.pop(request, None)
            return
        _allow(MASK_SECONDS)
        if request not in self._matchers:
            self._matchers[request] = self._matcher.deep_copy()
        matcher = self._matchers[request]
        if tokens and not matcher.consume_tokens(tokens):
            return self._connection.send_bytes(FAILED + matcher.get_error().encode())
        if question == "valid":
            return self._connection.send_bytes(self._fine() + str(matcher.validate_tokens(drafts)).encode())
        masks = [matcher.compute_bitmask()]
        num_ahead = 0
        for draft in drafts:
            if not _allows(masks[-1], draft) or draft in self._ends or matcher.is_error():
                break
            matcher.consume_token(draft)
            num_ahead += 1
            masks.append(matcher.compute_bitmask())
        if matcher.is_error():
            return self._connection.send_bytes(FAILED + matcher.get_error().encode())
        matcher.rollback(num_ahead)
        self._connection.send_bytes(self._fine() + b"".join(mask[: self._mask_bytes] for mask in masks))

    def _fine(self) -> bytes:
        self._num_answers += 1
        if self._num_answers % 64 == 0:
            self._is_worn = memory_in_use() - self._memory > WORN_BYTES
        return WORN if self._is_worn else OK


def _be_nice(thread: threading.Thread, niceness: int) -> None:
    """Let a thread give way to others; only Linux has a niceness for each."""
    if sys.platform == "linux" and thread.native_id is not None:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id, min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness))


def _try_masks(matcher: LLMatcher, ends: frozenset[int]) -> str:
    """Compute the masks after a few random tokens: a text whose masks take long is ended here, and in no step.

    Returns:
        Why there is nothing after the first token; "" if that is not so.
    """
    trial, draw, end = matcher.deep_copy(), random.Random(0), time.process_time() + TRIED_SECONDS
    for number in range(NUM_TRIED):
        token = _random_allowed(trial.compute_bitmask(), draw, ends)
        if token is None or time.process_time() > end:
            break
        if not trial.consume_token(token):
            return trial.get_error() if number == 0 else ""
    return ""


def _random_allowed(mask: bytes, draw: random.Random, ends: frozenset[int]) -> int | None:
    """A token that a mask allows, the first one behind a random place; None if there is none."""
    start = draw.randrange(len(mask))
    for place in chain(range(start, len(mask)), range(start)):
        for token in range(8 * place, 8 * place + 8) if mask[place] else ():
            if _allows(mask, token) and token not in ends:
                return token
    return None


def _allows(mask: bytes, token: int) -> bool:
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _allow(seconds: float) -> None:
    """Let the system end this process after more processor time: the engine has ended it before, if it still lives."""
    limit = math.ceil(time.process_time() + seconds) + 2
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


class Program:
    """Forks and ends children as the engine says.

    Args:
        engine: The connection to it.
        vocabulary: See `make_tokenizer`.
    """

    def __init__(self, engine: Connection, vocabulary: dict[str, Any]) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._tokenizer = make_tokenizer(vocabulary)
        self._children: set[int] = set()
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the end of a child wakes select()
        gc.freeze()

    def serve(self) -> None:
        """Do what the engine says, until it ends."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                ready, _, _ = select.select([self._engine.fileno(), self._woken], [], [])
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._children -= {child for child in self._children if os.waitpid(child, os.WNOHANG)[0]}
                if self._engine.fileno() in ready:
                    self._obey(self._engine.recv_bytes())
        for child in self._children:
            os.kill(child, signal.SIGKILL)

    def _obey(self, command: bytes) -> None:
        if command == b"fork":
            descriptor = reduction.recv_handle(self._engine)
            try:
                answer = str(self._fork(descriptor))
            except OSError as problem:
                answer = f"the system starts no process for it: {problem.strerror}"
            os.close(descriptor)
            self._engine.send_bytes(answer.encode())
        elif (child := int(command)) in self._children:  # it has not been waited for: the number is still its own
            os.kill(child, signal.SIGKILL)

    def _fork(self, descriptor: int) -> int:
        """A new child with a descriptor; returns in this process alone."""
        if (child := os.fork()) != 0:
            self._children.add(child)
            return child
        try:
            if sys.platform == "linux":  # elsewhere the limit of processor time ends it
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when its parent is ended
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._engine.fileno(), self._woken, self._wakes):
                os.close(other)
            with contextlib.suppress(EOFError, ConnectionError):
                Child(Connection(descriptor), self._tokenizer, self._vocabulary).work()
        finally:
            os._exit(0)


def main() -> None:
    """Read the vocabulary, and serve."""
    engine = Connection(int(sys.argv[1]))
    try:
        program = Program(engine, json.loads(engine.recv_bytes()))
    except Exception as problem:  # of a tokenizer that llguidance cannot read
        engine.send_bytes(FAILED + first_line(str(problem)).encode())
        return
    engine.send_bytes(OK)
    program.serve()


if __name__ == "__main__":
    main()

"""The texts of grammars: each is compiled once, for all requests, in a process that can be ended.

Short work never waits for long work. A text begins in one of a few places for short work. If it needs more than a
moment of the processor, it moves to a place for long work, or begins again there when one is free. In both queues
clients take turns. A text that nobody waits for any more is ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from workbench.engine.grammar_form import first_line
from workbench.engine.grammar_host import GrammarHost, GrammarProcess, Patience
from workbench.engine.grammar_process import COMPILE_SECONDS, FAILED, MASK_SECONDS, SHORT_SECONDS, TRIED_SECONDS

log = logging.getLogger("workbench")

T = TypeVar("T")

WAIT_SECONDS = 60.0
"""Maximum time that compiling a text may take on a busy system, by the clock."""

LONG_SECONDS = 2.0
"""Time from which the log says that a text takes long."""

MAX_SHORT, MAX_LONG = 8, 2
"""Maximum number of texts that are compiled together."""

MAX_KEPT, MAX_KEPT_BYTES, KEPT_SECONDS = 32, 2**28, 10.0
"""Maximum number of compiled texts that no request uses, of bytes that their processes have added to memory, and of
seconds since their last request."""

MAX_KNOWN = 1024
"""Maximum number of texts that are remembered, those that cannot be used among them."""


class _Later(Exception):
    """There is no place for long work now."""


class _Refused(Exception):
    """The text cannot be used.

    Args:
        problem: The sentence for those who wait.
        remember: Refuse the same text from now on.
    """

    def __init__(self, problem: str, *, remember: bool = True) -> None:
        super().__init__(problem)
        self.remember = remember


class GrammarText:
    """One text, and what has become of it.

    Args:
        kind: Word of ``SamplingParams(structured_outputs=...)``.
        text: Its value, see `text_of`.
        client: The client that takes a turn for it.

    Attributes:
        validated: Done when the text has been read; it raises the ValueError of a text that is not valid.
        compiled: Done when it has been compiled; it raises the ValueError of one that cannot be used.
        failure: Why it cannot be used any more; "" if nothing is wrong.
        num_users: Number of requests that have it or wait for it.
        size: Its number of characters.
        num_bytes: Memory that its process has added.
        is_long: It has needed more than a moment.
        is_reported: The log says that it takes long.
        begun: When its process began.
        spent_before: Processor seconds that compiling has taken, while its masks are tried.
        unused_since: When its last user left.
    """

    def __init__(self, kind: str, text: str, client: str, patience: Patience) -> None:
        self.kind, self.text, self.client, self.patience = kind, text, client, patience
        self.size, self.num_bytes = len(text), 0
        self.validated: Future[None] = Future()
        self.compiled: Future[None] = Future()
        self.process: GrammarProcess | None = None
        self.failure = ""
        self.num_users = 0
        self.is_long = self.is_reported = False
        self.since = time.monotonic()
        self.begun: float | None = None
        self.spent_before: float | None = None
        self.unused_since = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether masks can be computed."""
        return self.compiled.done() and not self.failure

    def refuse(self, problem: str) -> None:
        """Let everybody who waits know that it cannot be used."""
        self.failure = self.failure or problem
        self.text = ""
        for future in (self.validated, self.compiled):
            if not future.done():
                future.set_exception(ValueError(self.failure))

    def __str__(self) -> str:
        return f"a grammar ({self.kind}, {self.size:,} characters)"


class Turns(Generic[T]):
    """A queue in which clients take turns."""

    def __init__(self) -> None:
        self._of_client: dict[str, deque[T]] = {}

    def add(self, client: str, item: T) -> None:
        """Append to a client's part."""
        self._of_client.setdefault(client, deque()).append(item)

    def take(self) -> T | None:
        """The first item of the client whose turn it is; None if there is none."""
        if not self._of_client:
            return None
        client = next(iter(self._of_client))
        items = self._of_client.pop(client)
        item = items.popleft()
        if items:
            self._of_client[client] = items
        return item

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))


class GrammarTexts:
    """The texts of one model's requests.

    Args:
        host: Makes their processes.
    """

    def __init__(self, host: GrammarHost) -> None:
        self._host = host
        self._patience = Patience()
        self._lock = threading.RLock()
        self._known: OrderedDict[tuple[str, bytes], GrammarText] = OrderedDict()
        self._waiting: dict[bool, Turns[GrammarText]] = {False: Turns(), True: Turns()}
        self._at_work: dict[bool, set[GrammarText]] = {False: set(), True: set()}
        self._is_closed = self._looks_again = False

    def join(self, kind: str, text: str, client: str) -> GrammarText:
        """A text, for one more user, who has to ``leave`` it; it is compiled if it is not known."""
        key = kind, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._known.get(key)
            if found is None or (found.process is not None and found.process.is_worn):
                found = self._known[key] = GrammarText(kind, text, client, self._patience)
                self._waiting[False].add(client, found)
            found.num_users += 1
            self._known.move_to_end(key)
            self._begin_more()
            self._forget_some()
            return found

    def leave(self, text: GrammarText) -> None:
        """One user less."""
        with self._lock:
            text.num_users -= 1
            if not text.num_users:
                text.unused_since = time.monotonic()
                self._forget_some()
                if text.compiled.done() and text not in self._known.values():  # another has taken its place
                    self._let_go(text)

    def fail(self, text: GrammarText, problem: str, *, remember: bool) -> None:
        """Refuse a compiled text from now on, or until it is compiled again for the next request."""
        with self._lock:
            text.refuse(problem)
            if not remember:
                self._forget(text)
        self._end_process(text)

    def _forget_some(self) -> None:
        """Give up what nobody waits for, and keep what nobody uses within limits, the newest first."""
        unused = sorted(
            (text for text in self._known.values() if not text.num_users), key=lambda text: text.unused_since
        )
        kept = [text for text in unused if text.process is not None and text.compiled.done()]
        num_bytes = sum(text.num_bytes for text in kept)
        given_up = [text for text in unused if not text.compiled.done()]
        oldest = time.monotonic() - KEPT_SECONDS
        while kept and (len(kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES or kept[0].unused_since < oldest):
            num_bytes -= kept[0].num_bytes
            given_up.append(kept.pop(0))
        failed = [text for text in unused if text.failure]
        for text in given_up + failed[: max(0, len(self._known) - MAX_KNOWN)]:
            self._forget(text)
            if text.compiled.done():  # else the thread that compiles it ends the process
                self._let_go(text)
        if kept and not self._looks_again:
            self._looks_again = True
            timer = threading.Timer(max(0.1, kept[0].unused_since - oldest), self._look_again)
            timer.daemon = True
            timer.start()

    def _look_again(self) -> None:
        with self._lock:
            self._looks_again = False
            self._forget_some()

    def _forget(self, text: GrammarText) -> None:
        self._known = OrderedDict((key, each) for key, each in self._known.items() if each is not text)

    def _let_go(self, text: GrammarText) -> None:
        """End the process of a text, which has nothing to do and ends when it is let go."""
        process, text.process = text.process, None
        if process is not None:
            process.close()

    def _end_process(self, text: GrammarText) -> None:
        """End the process of a text, whatever it does."""
        process, text.process = text.process, None
        if process is not None:
            self._host.end(process)

    # -- compiling ---------------------------------------------------------------------------------------------

    def _begin_more(self) -> None:
        for is_long, limit in ((False, MAX_SHORT), (True, MAX_LONG)):
            while len(self._at_work[is_long]) < limit and (text := self._waiting[is_long].take()) is not None:
                if text.num_users:
                    text.is_long = is_long
                    self._at_work[is_long].add(text)
                    thread = threading.Thread(target=self._work, args=(text,), name="workbench-grammar", daemon=True)
                    thread.start()

    def _work(self, text: GrammarText) -> None:
        """Compile a text, or find out that it cannot be; on a thread that waits for its process."""
        problem: _Refused | None = None
        is_later = False
        try:
            text.begun = time.monotonic()
            text.process = self._host.fork()
            text.process.send(json.dumps((text.kind, text.text)).encode())
            self._validate(text)
            self._compile(text)
        except _Later:
            is_later = True
        except _Refused as refused:
            problem = refused
        except (EOFError, ConnectionError):
            log.warning("the process of %s has ended: it took too much memory, or was ended", text)
            problem = _Refused(
                f"{_name(text)} takes too much memory to compile, or its process was ended: make it smaller",
                remember=False,
            )
        except Exception as other:
            log.exception("%s cannot be compiled", text)
            problem = _Refused(f"{_name(text)} cannot be compiled: {other}", remember=False)
        if is_later or problem is not None:
            self._end_process(text)
        with self._lock:
            self._at_work[text.is_long].discard(text)
            if is_later:
                text.begun = text.spent_before = None
                self._waiting[True].add(text.client, text)
            elif problem is not None:
                self.fail(text, str(problem), remember=problem.remember)
            self._begin_more()

    def _validate(self, text: GrammarText) -> None:
        state, problem = self._receive(text)
        if state == FAILED:
            raise _Refused(f"{_name(text)} is not valid: {problem}")
        if not text.validated.done():
            text.validated.set_result(None)

    def _compile(self, text: GrammarText) -> None:
        self._receive_use(text)
        text.spent_before = self._spent(text)
        answer = self._receive_use(text)
        with self._lock:
            self._check_users(text)
            text.num_bytes = int(answer)
            text.text = ""  # its process has it
            text.compiled.set_result(None)
            self._forget_some()

    def _receive_use(self, text: GrammarText) -> str:
        state, answer = self._receive(text)
        if state == FAILED:
            raise _Refused(f"{_name(text)} cannot be used: {first_line(answer)}")
        return answer

    def _receive(self, text: GrammarText) -> tuple[bytes, str]:
        assert text.process is not None
        received = text.process.receive(math.inf, lambda: self._may_continue(text))
        return received[:1], received[1:].decode("utf-8", "replace")

    def _spent(self, text: GrammarText) -> float:
        """Processor seconds that the text has taken; by the clock where the system does not count them."""
        assert text.process is not None and text.begun is not None
        spent = text.process.processor_seconds()
        return time.monotonic() - text.begun if spent is None else spent

    def _check_users(self, text: GrammarText) -> None:
        if not text.num_users or self._is_closed:
            raise _Refused("structured_outputs: nobody waits for it any more", remember=False)

    def _may_continue(self, text: GrammarText) -> bool:
        """Check a text that is being compiled, a few times a second."""
        self._check_users(text)
        assert text.begun is not None
        clock = time.monotonic() - text.begun
        spent = self._spent(text)
        if text.spent_before is not None:
            if spent - text.spent_before > TRIED_SECONDS + MASK_SECONDS:
                raise _Refused(
                    f"{_name(text)} cannot be used: the tokens that it allows take more than {MASK_SECONDS:g} s to "
                    "find; make it smaller, or less ambiguous"
                )
            return True
        if spent > COMPILE_SECONDS or clock > WAIT_SECONDS:
            by_clock = spent <= COMPILE_SECONDS
            limit = f"{WAIT_SECONDS:g} s on this busy system" if by_clock else f"{COMPILE_SECONDS:g} s"
            log.warning("%s was ended: it took more than %s to compile", text, limit)
            advice = "make it smaller, or less ambiguous"
            raise _Refused(f"{_name(text)} takes more than {limit} to compile: {advice}", remember=not by_clock)
        if spent > SHORT_SECONDS and not text.is_long:
            with self._lock:
                if len(self._at_work[True]) >= MAX_LONG:
                    raise _Later
                self._at_work[False].discard(text)
                self._at_work[True].add(text)
                text.is_long = True
                self._begin_more()
        if clock > LONG_SECONDS and not text.is_reported:
            text.is_reported = True
            log.warning("%s has been compiling for %.1f s, %.1f s of them on a processor", text, clock, spent)
        return True

    def at_work(self) -> list[dict[str, Any]]:
        """The texts that are compiled, or wait for it: kind, characters, seconds since the first request, state."""
        now = time.monotonic()
        with self._lock:
            return [
                {
                    "kind": text.kind,
                    "characters": text.size,
                    "seconds": round(now - text.since, 3),
                    "state": "waiting" if text.begun is None else "compiling",
                }
                for text in self._known.values()
                if not text.compiled.done()
            ]

    def close(self) -> None:
        """End all processes, and let those who wait know."""
        with self._lock:
            self._is_closed = True
            for text in self._known.values():
                text.refuse("structured_outputs: the engine is closed")
            self._known.clear()
        self._host.close()


def _name(text: GrammarText) -> str:
    return f"structured_outputs[{text.kind!r}]"

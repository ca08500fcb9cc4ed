"""Keeps one view up to date: sends it new steps and the state of the engine, and carries out its commands.

The host (a notebook widget or a Panel session) calls ``update`` at the pace of `workbench.viz.pace` and passes the
view's commands to ``handle``. The feed never waits for the engine, nor the engine for the feed: all steps between two
polls travel in one packet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from workbench.base.field_checks import integer
from workbench.trace.errors import TraceError
from workbench.trace.readings.breakpoints import Breakpoints
from workbench.trace.records import WorkItem
from workbench.trace.trace import Trace
from workbench.viz import router_duel
from workbench.viz.background import in_background
from workbench.viz.changed_run import Changed, changed_run, terms_of_changes
from workbench.viz.classroom import Classroom
from workbench.viz.duel import MEASURES, Score, question, settled
from workbench.viz.export_html import PagePlace, html_page
from workbench.viz.kernel_run import page as kernel_page
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import encode_other
from workbench.viz.layout.explanation import explanation_facts
from workbench.viz.layout.incident import incident_facts
from workbench.viz.layout.packet import encode_packet, trace_facts
from workbench.viz.link import link_to
from workbench.viz.pareto import tuning_facts
from workbench.viz.settings_in_steps import settings_in_steps
from workbench.viz.visible_step import VisibleStep

log = logging.getLogger("workbench")

ABILITIES = ("breakpoints", "step_into", "capture", "shadow", "kernel_run")
"""Optional attributes of a controller that a view may use; `fork` is another one."""

RIGHTS = {"control": "start", "ask": "add_request", "foresee": "fork"}
"""Rights of a page, each by a command that it allows; a class may refuse them."""

MOST_REPEATED, MOST_SENDERS = 4, 32
"""Maximum number of commands that one repeats, and of pages whose last command is known."""

MAX_ASKED = 32
"""Maximum number of a view's own questions that are told to it; the newest are."""

ASKED_CHARACTERS = 2_000
"""Maximum number of characters of such a question."""

LINK = "link"
"""The name under which a download is a link to copy instead of a file to save."""

REPEAT_STEPS = 64
"""Number of steps that are sent again until a view confirms that it is loaded; until then packets can be lost."""

KERNEL_PAGE = ".kernelrun.html"
"""End of the name of the page of a recorded kernel, which the view shows instead of saving it."""

MAX_FIELD = 2**31
"""Largest value of a field of a work item that a view sends."""

_TURN = threading.Lock()
"""Held by the work of a server's view: each takes processor time from the engine."""


_NO_SETTING = (
    "no setting can be chosen by a target. Compare single settings with What if, or record a longer run with less else "
    "running."
)


def _first_step(trace: Trace) -> int:
    return trace[0].step if len(trace) else 0


def _next_step(trace: Trace) -> int:
    """The number of the step that is computed now, or comes next."""
    return trace[-1].step + 1 if len(trace) else 0


def _words_of(problem: Exception) -> str:
    return f"{problem}" or type(problem).__name__


class Feed:
    """The data for one view, and its commands.

    Args:
        source: A Trace, a function that returns one, or a controller: an object with ``trace``, ``state``,
            ``start()``, ``pause()``, ``step()``, ``add_request(prompt, **params)`` and ``abort(request_id)``, such as
            an Engine. Optional attributes of a controller add abilities to the view: ``breakpoints``; ``step_into``
            and ``phase`` (steps phase by phase); ``fork`` (the same run under another configuration); ``capture`` (the
            attention weights of a layer); ``shadow`` (the newest step's attention through the Metal source as well). A
            run that forgets its oldest steps continues in another Trace, and the view then starts again with that one.
        other: A second trace to compare with.
        room: The class that the view is in, if it is one of a served dashboard.

    Attributes:
        watching: The source is a function: the view is one of a server's.
    """

    def __init__(self, source: Any, other: Trace | None = None, room: Classroom | None = None) -> None:
        self.room = room
        self.on_news: Callable[[], None] = lambda: None  # called when the class has news
        self.watching = callable(source)
        self.controller: Any = None if self.watching or isinstance(source, Trace) else source
        self._newest_trace: Callable[[], Trace] = source if self.watching else lambda: getattr(source, "trace", source)
        self.trace = self._newest_trace()
        self._other = other
        self._other_sent: Trace | None = None
        self._visible = VisibleStep(self.controller, self._newest_trace)
        self._mounted = False
        self._opened_in = _next_step(self.trace)
        self._loaded_beside = range(0)  # steps beside which the page was loaded, and that are not marked yet
        self._sent: dict[str, int] = {}  # sizes of what has been sent of the trace
        self._message, self._kind = "", "problem"
        self._handled = 0
        self._last: dict[str, int] = {}  # the number of the last command that was carried out, by sender
        self._asked: dict[str, str] = {}
        self._fork_facts: dict[str, Any] | None = None
        self._unchanged: Trace | None = None  # the run as it was, simulated like the other trace
        self._not_simulated: dict[str, Any] | None = None  # the newest change that was refused, and the reason
        self._explained: dict[str, Any] | None = None
        self._explanations: dict[str, dict[str, Any]] = {}  # the answers about requests that had ended, by their ids
        self._tuned: dict[str, Any] | None = None
        self._tuning: list[int] | None = None  # settings simulated and to simulate, during a search
        self._ends_tuning = False
        self._incident: dict[str, Any] | None = None
        self._forks = 0
        self._download: bytes | None = None
        self._compared: Changed | None = None  # the newest duel that is shown beside the run
        self._bets: dict[str, Any] | None = None  # a duel, on its way to the class
        self._settled: tuple[Score, Changed | None] | None = None  # its end, likewise
        self._packet: bytes | None = None  # made by prepare()
        self._resend = False
        self._lock = threading.Lock()
        self._working = False
        self._looks = 0  # that a view has asked for since its thread began
        self._looking = threading.Lock()

    # -- to the view -----------------------------------------------------------------------------------------

    def is_far_behind(self) -> bool:
        """Whether more is to be encoded than between two updates of a view that is loaded."""
        if self._resend:
            return True
        trace = self._newest_trace()
        num_steps = len(trace) - (self._sent.get("step", 0) if trace is self.trace else 0)
        return num_steps > (REPEAT_STEPS if self._mounted else 0)

    def prepare(self) -> None:
        """Encode the newest steps for the next `update`. May be called from any thread."""
        self._packet = self.next_packet()

    def next_packet(self) -> bytes | None:
        """The steps that the view has not received yet, or None if there is nothing new."""
        with self._lock:
            if (newest := self._newest_trace()) is not self.trace:
                gone = self.trace.requests.keys() - newest.requests.keys()
                self._asked = {request_id: text for request_id, text in self._asked.items() if request_id not in gone}
                self.trace = newest
                self._sent, self._explanations = {}, {}
            self._mark_disturbed()
            columns = columns_of(self.trace)
            sizes, sent = columns.sizes(), self._sent
            if sizes == sent and not self._resend:
                return None
            whole = self._resend or not sent
            first = 0 if whole else sent["step"] - (0 if self._mounted else REPEAT_STEPS)
            # Requests and strings are few compared to the steps. Until a view is loaded, each packet has all of them,
            # so that it is complete without the packets before it.
            complete = whole or not self._mounted
            packet = encode_packet(
                columns,
                max(0, first),
                sizes["step"],
                known={} if complete else sent,
                extra={"facts": trace_facts(self.trace)} if complete else None,
            )
            self._sent, self._resend = sizes, False
            return packet

    def update(self, view: Any) -> None:
        """Set the ``packet``, ``other`` and ``status`` of a view, each only if it is new."""
        packet, self._packet = self._packet or self.next_packet(), None
        if packet is not None:
            view.packet = packet
        if (room := self.room) is not None:  # the class is of this thread
            if (bets := self._bets) is not None:
                self._bets = None
                self._attempt(lambda: room.take(self, **bets))
            if (settled := self._settled) is not None:
                self._settled = None
                room.settle(*settled)
            if room.comparison is None and self._compared is not None:  # closed, or the next question is open
                if self._other is self._compared.trace:
                    self._other = self._fork_facts = self._unchanged = None
                self._compared = None
            if (shown := room.comparison) is not None and shown is not self._compared and room.belongs(self):
                self._compared, self._other_sent = shown, None
                self._other, self._fork_facts, self._unchanged, *_ = shown
        if (other := self.other_packet()) is not None:
            view.other = other
        if (download := self._download) is not None:
            self._download = None
            view.download = download
        if (status := self.status()) != view.status:
            view.status = status

    def confirm(self) -> None:
        """The view is loaded and has read a packet: from now on none is lost, and each step is sent once."""
        if not self._mounted and self.controller is not None:  # the page was loaded beside the engine's steps
            self._loaded_beside = range(self._opened_in, _next_step(self.trace) + 1)
            self._mark_disturbed()
        self._mounted = True
        if self.room is not None:
            self.room.enter(self, self.on_news)

    def _mark_disturbed(self) -> None:
        """Mark the steps beside which the page was loaded; the one that was computed meanwhile once it is recorded."""
        if (steps := self._loaded_beside) and (there := _next_step(self.trace)) > steps.start:
            self.trace.mark_disturbed(range(steps.start, min(there, steps.stop)))
            self._loaded_beside = range(there, steps.stop)

    def other_packet(self) -> bytes | None:
        """The whole trace to compare with, or None if there is none or it has been sent already."""
        other = self._other
        if other is None or other is self._other_sent:
            return None
        self._other_sent = other
        return encode_other(self.trace, other, self._fork_facts, self._unchanged)

    def status(self) -> dict[str, Any]:
        """The state of the engine as the view shows it, and the abilities of the engine."""
        if self.controller is None:
            return {
                "live": False,
                "watching": self.watching,
                "message": self._message,
                "kind": self._kind,
                "handled": self._handled,
                "can": ["save_html", *self._simulations()],
                **self._answers(),
            }
        if (row := self._visible.follow()) is not None:
            self._attempt(lambda: self._do_show_weights(row))
        status = {
            "live": True,
            "state": self.controller.state,
            "name": str(self.controller.name),
            "message": self._message,
            "kind": self._kind,
            "handled": self._handled,
            "can": ["save_html", *filter(self._has, ABILITIES), *self._simulations()],
            "chat": self._has_chat_template(),
            "asked": list(self._asked.items()),
            **self._visible.status(),
            **self._answers(),
        }
        if hasattr(self.controller, "breakpoints"):
            breakpoints = self.controller.breakpoints
            status["breakpoints"] = [[item.number, item.label, item.hits] for item in breakpoints]
            status["stopped_by"] = breakpoints.stopped_by
        return status

    def _answers(self) -> dict[str, Any]:
        """The questions that the trace itself answers, and the newest answers."""
        answers = {
            "explains": True,
            "explained": self._explained,
            "not_simulated": self._not_simulated,
            "tuned": self._tuned,
            "tuning": self._tuning,
            "incident": self._incident,
        }
        if self.room is None:
            return answers
        refused = {name: bool(self.room.refusal(self, command)) for name, command in RIGHTS.items()}
        return {**answers, "class": self.room.facts(self), "refused": refused}

    def _has_chat_template(self) -> bool:
        try:
            return bool(self.controller.tokenizer.has_chat_template)
        except (AttributeError, ValueError):  # a controller, or a model, without a tokenizer
            return False

    # -- from the view ---------------------------------------------------------------------------------------

    def handle(self, command: dict[str, Any]) -> None:
        """Carry out a command of the view, and those before it that have not come.

        A host passes on the last value of a property, and may leave out those that came shortly before it; so a command
        repeats these as ``before``, by their numbers. An error becomes the message of the view; nothing is raised.
        """
        sender, before = command.get("sender"), command.get("before")
        repeated = before.items() if isinstance(before, dict) else ()
        numbers = sorted((int(number), each) for number, each in repeated if str(number).isdecimal())
        for number, each in [*numbers[-MOST_REPEATED:], (command.get("id"), command)]:
            if isinstance(sender, str) and isinstance(number, int):
                if number <= self._last.get(sender, 0):
                    continue
                self._last = dict([*self._last.items(), (sender, number)][-MOST_SENDERS:])
            if isinstance(each, dict):
                self._carry_out(number, each)

    def _carry_out(self, number: Any, command: dict[str, Any]) -> None:
        name = command.get("name")
        handler = getattr(self, f"_do_{name}", None)
        if handler is None:
            self._message = f"unknown command {name!r}"
        elif self.room is not None and (reason := self.room.refusal(self, str(name))):
            self._message = reason
        else:
            self._attempt(lambda: handler(**dict(command.get("args") or {})))
        if isinstance(number, int):
            self._handled = number

    def _attempt(self, work: Callable[[], Any]) -> None:
        try:
            self._message, self._kind = "", "problem"
            work()
        except Exception as problem:
            self._message = _words_of(problem)
            log.info("a command of a view failed: %s", problem)

    def _in_background(self, work: Callable[[], Any]) -> None:
        """Run work that waits for the engine on another thread, because the view must not wait.

        Views of a server belong to anybody: their work is done one after the other, and a view may wait with one.

        Raises:
            ValueError: The work of the view's command before has not ended.
        """
        if not self.watching:
            in_background(lambda: self._attempt(work), "workbench-command")
            return
        if self._working:
            raise ValueError("the answer to the question before is still being computed: ask again when it is there")
        self._working = True

        def in_turn() -> None:
            try:
                with _TURN:
                    self._attempt(work)
            finally:
                self._working = False

        in_background(in_turn, "workbench-command")

    def _engine(self, ability: str = "start") -> Any:
        if self.controller is None:
            raise ValueError("this is a recording: only a live engine can be controlled")
        if not hasattr(self.controller, ability):
            raise ValueError(f"this engine has no {ability}()")
        return self.controller

    def _do_class(self, **values: Any) -> None:
        if self.room is None:
            raise ValueError("this view is not of a served dashboard, so there is no class")
        self.room.enter(self, self.on_news)
        if values.get("what") != "bet" or "unit" in values or not self.room.teaches(self):
            self.room.take(self, **values)
            return
        if (routers := values.get("routers")) is not None:
            routers = router_duel.read_routers(routers)
        changes = values.get("changes") or {}
        question(changes, str(values.get("measure")), routers)  # which may refuse
        fork = self._fork()

        def ask() -> None:
            """Say in the question in which unit the duel can be settled, what is a tie, and what the run has now.

            A change that the requests so far cannot have is refused here, before anybody has bet.
            """
            trace = self._newest_trace()
            if changes and len(trace):
                fork(at_step=_first_step(trace), **changes)
            unit, uncertain = terms_of_changes(trace, MEASURES[values["measure"]].predicted if changes else "")
            self._bets = {**values, "unit": unit, "uncertain": uncertain, "now": trace.config}

        self._in_background(ask)

    def _do_settle(self) -> None:
        """Simulate the other side of the duel, show it beside the run, and tell the class who has won.

        Two routers are both simulated, and neither side is shown: the run is neither of them.
        """
        if self.room is None or (duel := self.room.duel) is None:
            raise ValueError("there is no duel to settle: let the class bet on one first")
        fork, changes = self._fork(), duel["changes"]
        terms = duel["measure"], duel["unit"], duel["uncertain"]

        def settle() -> None:
            trace = self._newest_trace()
            if duel["routers"] is not None:
                self._settled = router_duel.settled(trace, duel["routers"], *terms), None
                return
            changed = self._show_fork(trace, fork, _first_step(trace), changes)
            self._settled = settled(trace, changed, *terms), changed

        self._in_background(settle)

    def _do_resend(self) -> None:
        self._resend = True
        self._other_sent = None

    def _do_start(self) -> None:
        self._engine().start()

    def _do_pause(self) -> None:
        self._in_background(self._engine().pause)

    def _do_step(self) -> None:
        self._in_background(self._engine().step)

    def _do_step_into(self, layers: bool = True) -> None:
        engine = self._engine("step_into")
        self._in_background(lambda: engine.step_into(layers=layers))

    def _do_add_request(self, prompt: str, chat: bool = False, run: bool = False, **params: Any) -> None:
        """Queue a prompt, through the model's chat template or as it is; an idle engine then runs."""
        engine = self._engine()
        idle = engine.state == "idle"
        messages = (
            [{"role": "user", "content": prompt}] if chat and prompt.strip() and self._has_chat_template() else None
        )
        request_id = engine.add_request(messages or prompt, **params)
        if isinstance(request_id, str):
            self._asked[request_id] = prompt[:ASKED_CHARACTERS]
            self._asked = dict(list(self._asked.items())[-MAX_ASKED:])
        if run and idle:
            engine.start()

    def _do_abort(self, request_id: str) -> None:
        self._engine().abort(request_id)

    def _do_fork(self, at_step: int, changes: dict[str, Any]) -> None:
        self._not_simulated = None
        self._forks += 1
        number = self._forks

        def show() -> None:
            if number != self._forks:  # a slider has moved on since
                return
            with self._refusal_told(at_step, changes):
                self._show_fork(self._newest_trace(), fork, at_step, changes, number)

        with self._refusal_told(at_step, changes):
            fork = self._fork()
            self._in_background(show)

    @contextmanager
    def _refusal_told(self, at_step: int, changes: dict[str, Any]) -> Iterator[None]:
        """Tell the view why a change cannot be simulated: it waits for an answer to this change, not for a message."""
        try:
            yield
        except Exception as problem:
            self._not_simulated = {"at_step": at_step, "changes": changes, "reason": _words_of(problem)}
            raise

    def _has(self, ability: str) -> bool:
        return hasattr(self.controller, ability)

    def _simulations(self) -> list[str]:
        """What the view may ask for: "fork" for *What if* about the steps on display, "tune" for *Which setting?*.

        A simulation begins at step 0, so "fork" needs the first steps on display, and no other run beside them that a
        person has chosen. "tune" predicts the whole run for the requests on display.
        """
        trace = self._newest_trace()
        is_alone = self._other is None or self._fork_facts is not None
        forks = not _first_step(trace) and (is_alone if self.controller is None else self._has("fork"))
        return [*(["fork"] if forks else []), *(["tune"] if not _first_step(trace.whole) else [])]

    def _fork(self, *, is_whole: bool = False) -> Callable[..., Trace]:
        """The function that simulates the run under another configuration: its engine's, or that for recordings.

        Args:
            is_whole: Simulate the run from which the steps on display were taken.
        """
        if self.controller is not None:
            method: Callable[..., Trace] = self._engine("fork").fork
            return method

        def fork(**values: Any) -> Trace:
            from workbench.analysis.fork import fork as fork_recording

            trace = self._newest_trace()
            return fork_recording(trace.whole if is_whole else trace, **values)

        return fork

    def _show_fork(
        self, trace: Trace, fork: Callable[..., Trace], at_step: int, changes: dict[str, Any], number: int | None = None
    ) -> Changed:
        """Simulate a run with changes and show it beside the run, unless a newer simulation was asked for."""
        up_to = trace[-1].step if len(trace) else -1
        changed = changed_run(trace, fork, at_step, changes)
        changed = changed._replace(facts={"at_step": at_step, "changes": changes, "up_to": up_to, **changed.facts})
        if number in (None, self._forks):
            self._other, self._fork_facts, self._unchanged, *_ = changed
        return changed

    def _do_explain(self, request_id: str) -> None:
        """Explain a request; the answer about one that has ended stays as it was first given."""
        trace = self._newest_trace()
        if trace is self.trace and request_id in self._explanations:
            self._explained = self._explanations[request_id]
            return

        def explain() -> None:
            from workbench.analysis.explain import explain as explain_request

            try:
                found = explain_request(trace, request_id)
                facts = explanation_facts(found)
                if trace is self.trace and not found.is_open:
                    self._explanations[request_id] = facts
            except (ValueError, TraceError) as problem:
                facts = {"request": request_id, "spans": [], "confirmation": str(problem)}
            self._explained = facts

        self._in_background(explain)

    def _do_look(self) -> None:
        """Find what happened in the recording. A view asks by itself, so this waits for a person's question.

        However often a view asks, it has one thread: what it asks meanwhile is answered by one more look.
        """
        with self._looking:
            self._looks += 1
            if self._looks > 1:
                return

        def look() -> None:
            asked = 0
            while self._is_asked_again(asked):
                asked = self._looks
                try:
                    with _TURN:
                        self._incident = incident_facts(self._newest_trace())
                except BaseException:
                    self._looks = 0
                    raise

        in_background(look, "workbench-incident")

    def _is_asked_again(self, asked: int) -> bool:
        """Whether a view has asked for more looks than these; if not, the next one that it asks for begins a thread."""
        with self._looking:
            is_more = self._looks > asked
            if not is_more:
                self._looks = 0
            return is_more

    def _do_tune(self, slo: str) -> None:
        can_count = self.controller is None or self._has("fork")
        fork = self._fork(is_whole=True) if can_count else None
        self._tuned = None

        def tune() -> None:
            from workbench.analysis.predict import Predictor, whose_latencies
            from workbench.analysis.tune import tune as tune_run
            from workbench.simulation.costs.fit import NoSeconds

            self._tuning, self._ends_tuning = [0, 0], False
            trace = self._newest_trace()
            is_part = len(trace) < len(trace.whole)
            try:
                predictor = Predictor(trace.whole, counted=trace.requests, rough=True) if is_part else None
                tuned = tuning_facts(tune_run(trace.whole, slo, predictor=predictor, tell=self._tell_tuning))
                if is_part:
                    words = whose_latencies(len(trace.requests))
                    tuned["notes"].insert(0, f"{words[0].upper()}{words[1:]}.")
                self._tuned = tuned
            except KeyboardInterrupt:
                self._tuned = {"verdict": "Cancelled.", "candidates": [], "notes": []}
            except NoSeconds as problem:
                self._tuned = self._tuned_in_steps(f"{problem.plain[0].upper()}{problem.plain[1:]}", fork)
            except (ValueError, TraceError) as problem:
                self._tuned = {"verdict": str(problem), "candidates": [], "notes": []}
            finally:
                self._tuning = None

        self._in_background(tune)

    def _tuned_in_steps(self, reason: str, fork: Callable[..., Trace] | None) -> dict[str, Any]:
        """Other settings in steps and KV blocks, as seconds cannot be predicted."""
        trace = self._newest_trace().whole
        if fork is None or _first_step(trace):
            return {"verdict": f"{reason}: {_NO_SETTING}", "candidates": [], "notes": []}
        try:
            return settings_in_steps(trace, fork, reason, self._tell_tuning)
        except KeyboardInterrupt:
            return {"verdict": "Cancelled.", "candidates": [], "notes": []}
        except (ValueError, TraceError) as problem:
            return {"verdict": f"{reason}: {problem}", "candidates": [], "notes": []}

    def _tell_tuning(self, num_done: int, num_all: int) -> None:
        self._tuning = [num_done, num_all]
        if self._ends_tuning:
            raise KeyboardInterrupt

    def _do_end_tuning(self) -> None:
        """End the search for a setting; it answers with the best one so far."""
        self._ends_tuning = True

    def _do_save_html(self, place: Any = None, comparison: bool = True) -> None:
        """Save a page that opens at a place, with the run beside this one if their comparison is open."""
        opens_at = None if place is None else msgspec.convert(place, PagePlace)

        def save() -> None:
            trace, facts = self._newest_trace(), self._fork_facts
            grown = facts is not None and len(trace) > 0 and facts["up_to"] < trace[-1].step
            other = self._other if comparison and not grown else None
            page = html_page(trace, other=other, fork=facts, unchanged=self._unchanged, opens_at=opens_at)
            name = f"workbench-{time.strftime('%Y%m%d-%H%M%S')}.html"
            self._download = f"{name}\n{page}".encode("utf-8", "replace")

        self._in_background(save)

    def _do_link(self, step: int | None = None, request: str | None = None) -> None:
        """Send a link that opens the run in the playground, at a step and a request."""

        def link() -> None:
            self._download = f"{LINK}\n{link_to(self._newest_trace(), step=step, request_id=request)}".encode()

        self._in_background(link)

    def _do_capture(self, layer: int) -> None:
        self._visible.show_layer(self._engine("capture").capture(layer))

    def _do_shadow(self, step: int) -> None:
        """Run the newest step's attention through the Metal source on the emulator, and tell the comparison."""
        engine = self._engine("shadow")

        def shadow() -> None:
            run = engine.shadow(step)
            self._message, self._kind = repr(run), "note" if run.agrees else "problem"

        self._in_background(shadow)

    def _do_kernel_run(self, step: int, item: int | list[int], kv_head: int = 0) -> None:
        """Record the threadgroup of a work item of a step on the emulator, and send its page."""
        engine = self._engine("kernel_run")
        chosen = item if isinstance(item, int) else WorkItem(*(integer("item", field, 0, MAX_FIELD) for field in item))

        def record() -> None:
            run = engine.kernel_run(chosen, step, kv_head=integer("kv_head", kv_head, 0, MAX_FIELD))
            self._download = f"step-{step}{KERNEL_PAGE}\n{kernel_page(run)}".encode("utf-8", "replace")
            self._message, self._kind = run.about, "note"

        self._in_background(record)

    def _do_forget_capture(self) -> None:
        self._visible.show_layer(None)

    def _do_show_weights(self, row: int) -> None:
        self._visible.show_weights(row, self.trace)

    def _breakpoints(self) -> Breakpoints:
        return self._engine("breakpoints").breakpoints

    def _do_add_breakpoint(self, kind: str, **values: Any) -> None:
        adders: dict[str, Callable[..., Any]] = {
            "preemption": self._breakpoints().on_preemption,
            "free_blocks": self._breakpoints().on_free_blocks_below,
            "num_kv_computed": self._breakpoints().on_num_kv_computed,
            "block": self._breakpoints().on_block,
        }
        if kind not in adders:
            raise ValueError(f"breakpoint kind must be one of {', '.join(adders)}, got {kind!r}")
        adders[kind](**values)

    def _do_remove_breakpoint(self, number: int) -> None:
        self._breakpoints().remove(number)

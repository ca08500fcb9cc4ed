"""Keeps one view up to date: which steps it has seen, what it asked for, what it is told about the engine.

The host (a notebook widget or a Panel session) calls ``update`` at most ten times a second and hands commands of the
view to ``handle``. The engine is never waited for and never waits: what came between two
polls travels in one packet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from workbench.trace.breakpoints import Breakpoints
from workbench.trace.trace import Trace
from workbench.viz.attention_weights import weights_facts
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import encode_other
from workbench.viz.layout.packet import encode_packet, trace_facts
from workbench.viz.phases import describe_phase

log = logging.getLogger("workbench")

POLL_SECONDS = 0.1
"""Time between two updates of a view."""

REPEAT_STEPS = 64
"""Steps that are sent again until a view has said that it is there: packets are lost while a page is loading."""


class Feed:
    """What one view is sent.

    Args:
        source: A Trace, a function that returns one, or a controller: an object with ``trace``, ``state``,
            ``start()``, ``pause()``, ``step()``, ``add_request(prompt, **params)`` and ``abort(request_id)``, such as
            an Engine. With ``breakpoints`` it has breakpoints, with ``step_into`` and ``phase`` a step can be taken
            phase by phase, with ``fork`` it can be asked what would have been, with ``capture`` the weights of a
            layer can be seen. A run that forgets its oldest steps goes on in another Trace; the view then begins anew
            with that.
        other: A second trace to compare with.
    """

    def __init__(self, source: Any, other: Trace | None = None) -> None:
        self._watching = callable(source)
        self.controller: Any = None if self._watching or isinstance(source, Trace) else source
        self._newest_trace: Callable[[], Trace] = source if self._watching else lambda: getattr(source, "trace", source)
        self.trace = self._newest_trace()
        self._other = other
        self._other_sent: Trace | None = None
        self._phase: tuple[str, Any] | None = None
        self._phase_facts: dict[str, Any] | None = None
        self._capture: Any = None
        self._weights: dict[str, Any] | None = None
        self._mounted = False
        self._begin()
        self._message = ""
        self._resend = False
        self._lock = threading.Lock()

    def _begin(self) -> None:
        """Nothing of the trace has been sent yet."""
        self._sent = 0
        self._sent_requests = -1
        self._known_requests = self._known_strings = self._known_kernels = self._known_shadows = 0

    # -- to the view -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Encode the newest steps, so that ``next_packet`` only has to put them together."""
        columns_of(self._newest_trace())

    def next_packet(self) -> bytes | None:
        """The steps the view has not seen, or None when there is nothing new."""
        with self._lock:
            if (newest := self._newest_trace()) is not self.trace:
                self.trace = newest
                self._begin()
            columns = columns_of(self.trace)
            num_steps, num_requests, num_shadows = columns.num_steps, len(columns.requests), len(columns.shadows)
            seen = self._sent, self._sent_requests, self._known_shadows
            if seen == (num_steps, num_requests, num_shadows) and not self._resend:
                return None
            whole = self._resend or self._sent_requests < 0
            first = 0 if whole else self._sent if self._mounted else max(0, self._sent - REPEAT_STEPS)
            # Requests and strings are few and short beside the steps; sending all of them again until a view is
            # there keeps a packet complete in itself.
            behind = whole or not self._mounted
            packet = encode_packet(
                columns,
                first,
                num_steps,
                first_request=0 if behind else self._known_requests,
                first_string=0 if behind else self._known_strings,
                first_kernel=0 if behind else self._known_kernels,
                first_shadow=0 if behind else self._known_shadows,
                extra={"facts": trace_facts(self.trace)} if behind else None,
            )
            self._sent, self._sent_requests, self._resend = num_steps, num_requests, False
            self._known_requests, self._known_shadows = num_requests, num_shadows
            self._known_strings, self._known_kernels = len(columns.strings), len(columns.kernels)
            return packet

    def update(self, view: Any) -> None:
        """Give a view what is new of its ``packet``, its ``other`` and its ``status``."""
        if (packet := self.next_packet()) is not None:
            view.packet = packet
        if (other := self.other_packet()) is not None:
            view.other = other
        if (status := self.status()) != view.status:
            view.status = status

    def confirm(self) -> None:
        """The view is there and has taken in a packet: from now on none is lost, and each step is sent once."""
        self._mounted = True

    def other_packet(self) -> bytes | None:
        """The trace to compare with, whole, when it is another than the one sent last; None when it is not."""
        other = self._other
        if other is None or other is self._other_sent:
            return None
        self._other_sent = other
        return encode_other(self.trace, other)

    def status(self) -> dict[str, Any]:
        """What the view says about the engine, and what it can ask of it."""
        if self.controller is None:
            return {"live": False, "watching": self._watching, "message": self._message}
        self._follow_phase()
        status = {
            "live": True,
            "state": self.controller.state,
            "name": str(self.controller.name),
            "message": self._message,
            "can": [name for name in ("breakpoints", "step_into", "fork", "capture") if hasattr(self.controller, name)],
            "phase": self._phase_facts,
        }
        if self._capture is not None:
            status["capture"] = {
                "layer": self._capture.layer,
                "step": self._capture.step,
                "sequences": list(zip(self._capture.request_ids, self._capture.cu_seqlens_q[1:])),
            }
            status["weights"] = self._weights
        if hasattr(self.controller, "breakpoints"):
            breakpoints = self.controller.breakpoints
            status["breakpoints"] = [[item.number, item.label, item.hits] for item in breakpoints]
            status["stopped_by"] = breakpoints.stopped_by
        return status

    def _follow_phase(self) -> None:
        """Describe the phase a step stands at, whoever took it there; of a layer also what a row looks at."""
        phase = getattr(self.controller, "phase", None)
        if phase is self._phase:
            return
        self._phase = phase
        self._phase_facts = describe_phase(*phase) if phase is not None else None
        if self._phase_facts is not None and "layer" in self._phase_facts:
            layer = self._capture = phase[1]
            # The row a person has chosen stays from layer to layer; at first the last one of the first sequence.
            chosen = self._weights is not None and self._weights["step"] == layer.step
            row = self._weights["row"] if chosen else layer.cu_seqlens_q[1] - 1
            self._attempt(lambda: self._do_show_weights(row))

    # -- from the view ---------------------------------------------------------------------------------------

    def handle(self, command: dict[str, Any]) -> None:
        """Do what a view asks. A refusal becomes the view's message; nothing is raised."""
        name = command.get("name")
        handlers: dict[str, Callable[..., Any]] = {
            "resend": self._do_resend,
            "start": self._do_start,
            "pause": self._do_pause,
            "step": self._do_step,
            "step_into": self._do_step_into,
            "add_request": self._do_add_request,
            "abort": self._do_abort,
            "fork": self._do_fork,
            "capture": self._do_capture,
            "show_weights": self._do_show_weights,
            "add_breakpoint": self._do_add_breakpoint,
            "remove_breakpoint": self._do_remove_breakpoint,
        }
        handler = handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            self._message = f"unknown command {name!r}"
            return
        self._attempt(lambda: handler(**dict(command.get("args") or {})))

    def _attempt(self, work: Callable[[], Any]) -> None:
        try:
            self._message = ""
            work()
        except Exception as problem:
            self._message = f"{problem}" or type(problem).__name__
            log.info("a view's command was refused: %s", problem)

    def _in_background(self, work: Callable[[], Any]) -> None:
        """Do what waits for the engine on a thread, because the view must not wait."""
        threading.Thread(target=lambda: self._attempt(work), name="workbench-command", daemon=True).start()

    def _engine(self, ability: str = "start") -> Any:
        if self.controller is None:
            raise ValueError("this is a recording: only a live engine can be controlled")
        if not hasattr(self.controller, ability):
            raise ValueError(f"this engine has no {ability}()")
        return self.controller

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

    def _do_add_request(self, prompt: str, **params: Any) -> None:
        self._engine().add_request(prompt, **params)

    def _do_abort(self, request_id: str) -> None:
        self._engine().abort(request_id)

    def _do_fork(self, at_step: int, changes: dict[str, Any]) -> None:
        engine = self._engine("fork")

        def fork() -> None:
            self._other = engine.fork(at_step=at_step, **changes)

        self._in_background(fork)

    def _do_capture(self, layer: int) -> None:
        self._capture = self._engine("capture").capture(layer)
        self._weights = None

    def _do_show_weights(self, row: int) -> None:
        if self._capture is None:
            raise ValueError("nothing has been captured: choose a layer and take a step")
        decode = getattr(getattr(self.controller, "tokenizer", None), "decode", None)
        self._weights = weights_facts(self._capture, row, self.trace, decode or (lambda ids: f" {ids[0]}"))

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

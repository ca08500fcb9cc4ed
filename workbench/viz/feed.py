"""Keeps one view up to date: which steps it has seen, what it asked for, what it is told about the engine.

The host (a notebook widget or a Panel session) polls ``next_packet`` and ``status`` at most ten times a second and
hands commands of the view to ``handle``. The engine is never waited for and never waits: what came between two
polls travels in one packet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from workbench.trace.trace import Trace
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet, trace_facts

log = logging.getLogger("workbench")

POLL_SECONDS = 0.1
"""Time between two updates of a view."""

REPEAT_STEPS = 32
"""Steps that are sent again while a view has not confirmed them: a packet may be lost while a page is loading."""


class Feed:
    """What one view is sent.

    Args:
        source: A Trace, or a controller: an object with ``trace``, ``state``, ``start()``, ``pause()``, ``step()``,
            ``add_request(prompt, **params)`` and ``abort(request_id)``, such as an Engine.
    """

    def __init__(self, source: Any) -> None:
        self.trace: Trace = source if isinstance(source, Trace) else source.trace
        self.controller: Any = None if isinstance(source, Trace) else source
        self._sent = 0
        self._confirmed = 0
        self._sent_requests = -1
        self._message = ""
        self._resend = False
        self._lock = threading.Lock()

    # -- to the view -----------------------------------------------------------------------------------------

    def next_packet(self) -> bytes | None:
        """The steps the view has not seen, or None when there is nothing new."""
        with self._lock:
            columns = columns_of(self.trace)
            num_steps, num_requests = columns.num_steps, len(columns.requests)
            if (num_steps, num_requests) == (self._sent, self._sent_requests) and not self._resend:
                return None
            whole = self._resend or self._sent_requests < 0
            first = 0 if whole else max(self._confirmed, self._sent - REPEAT_STEPS)
            # Requests and strings are few and short beside the steps; sending all of them again while a view is
            # behind keeps a packet complete in itself.
            behind = whole or self._confirmed < self._sent
            packet = encode_packet(
                columns,
                first,
                num_steps,
                first_request=0 if behind else self._known_requests,
                first_string=0 if behind else self._known_strings,
                first_kernel=0 if behind else self._known_kernels,
                extra={"facts": trace_facts(self.trace)} if behind else None,
            )
            self._sent, self._sent_requests, self._resend = num_steps, num_requests, False
            self._known_requests = num_requests
            self._known_strings, self._known_kernels = len(columns.strings), len(columns.kernels)
            return packet

    def confirm(self, num_steps: int) -> None:
        """The view has taken in this many steps."""
        self._confirmed = min(max(self._confirmed, int(num_steps)), self._sent)

    def status(self) -> dict[str, Any]:
        """What the view says about the engine."""
        if self.controller is None:
            return {"live": False, "message": self._message}
        return {
            "live": True,
            "state": self.controller.state,
            "name": str(self.controller.name),
            "message": self._message,
        }

    # -- from the view ---------------------------------------------------------------------------------------

    def handle(self, command: dict[str, Any]) -> None:
        """Do what a view asks. A refusal becomes the view's message; nothing is raised."""
        name = command.get("name")
        handlers: dict[str, Callable[..., Any]] = {
            "resend": self._do_resend,
            "start": self._do_start,
            "pause": self._do_pause,
            "step": self._do_step,
            "add_request": self._do_add_request,
            "abort": self._do_abort,
        }
        handler = handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            self._message = f"unknown command {name!r}"
            return
        try:
            self._message = ""
            handler(**dict(command.get("args") or {}))
        except Exception as problem:
            self._message = f"{problem}" or type(problem).__name__
            log.info("command %s of a view was refused: %s", name, problem)

    def _engine(self) -> Any:
        if self.controller is None:
            raise ValueError("this is a recording: only a live engine can be controlled")
        return self.controller

    def _do_resend(self) -> None:
        self._resend = True
        self._confirmed = 0

    def _do_start(self) -> None:
        self._engine().start()

    def _do_pause(self) -> None:
        # Pausing waits for the step under way, which the view must not.
        threading.Thread(target=self._engine().pause, daemon=True).start()

    def _do_step(self) -> None:
        threading.Thread(target=self._engine().step, daemon=True).start()

    def _do_add_request(self, prompt: str, **params: Any) -> None:
        self._engine().add_request(prompt, **params)

    def _do_abort(self, request_id: str) -> None:
        self._engine().abort(request_id)

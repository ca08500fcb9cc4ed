"""The code of the views, as browsers run it, in a process of deno with a page that notes what is painted."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

from workbench.viz.bundle import bundle
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import encode_other
from workbench.viz.layout.packet import encode_packet, trace_facts

DENO = Path(sys.executable).parent / "deno"
PAGE = Path(__file__).with_name("page_in_deno.js")


class Page:
    """A view of one trace after another, in one process."""

    def __init__(self, module: str | None = None) -> None:
        command = [str(DENO), "run", "--no-check", "--quiet", str(PAGE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask({"module": b64encode((module or bundle()).encode()).decode()})

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"problem": "deno has ended"}')
        if "problem" in answer:
            raise AssertionError(answer["problem"])
        return answer["value"]

    def __call__(self, code: str, argument: Any = None) -> Any:
        """Evaluate an expression of ``page``, ``view`` and ``argument``."""
        return self._ask({"code": code, "argument": argument})

    def open(self, trace: Any, other: Any = None, changed: Any = None, **options: Any) -> Page:
        """Show a trace, beside another one or a `Changed` run; ``options`` are status, options and width."""
        packet = b64encode(encode_packet(columns_of(trace), extra={"facts": trace_facts(trace)})).decode()
        sides = (other,) if changed is None else changed[:3]
        second = b64encode(encode_other(trace, *sides)).decode() if sides[0] is not None else None
        self("page.open(argument)", {"packet": packet, "other": second, **options})
        return self

    def seek(self, step: int) -> None:
        """Move the cursor."""
        self("view.cursor.seek(argument)", step)

    def painted(self, panel: str, step: int | None = None) -> dict[str, Any]:
        """The marks of a panel at a step: its ``marks``, and those ``over`` the picture."""
        if step is not None:
            self.seek(step)
        return dict(self("page.painted(argument)", panel))

    def table(self, panel: str, step: int | None = None) -> dict[str, Any]:
        """The table of a panel at a step."""
        if step is not None:
            self.seek(step)
        return dict(self("page.table(argument)", panel))

    def hit(self, panel: str, x: float, y: float) -> list[str]:
        """The words for a point of a panel, an empty list for a point without any."""
        found = self("view.panel(argument[0]).hit(argument[1], argument[2])?.lines ?? null", [panel, x, y])
        return list(found or [])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)

"""The notebook view of a recorded kernel: an anywidget around the page's module."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from workbench.viz.bundle import bundle
from workbench.viz.kernel_run import ENTRY, Recording, run_html
from workbench.viz.still import Still


class KernelRunView(anywidget.AnyWidget):
    """A recorded kernel in a notebook cell.

    Attributes:
        packet: The bytes of the recording (`workbench.msl.KernelRun.packet`).
        options: Layout of the view.
        still: Class of the table of numbers that stays in a saved notebook, which the widget hides while it runs.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    packet = traitlets.Bytes(b"").tag(sync=True)
    options = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._still = Still(lambda: run_html(run))
        super().__init__(_esm=bundle(ENTRY), packet=run.packet(), options={}, still=self._still.name)

    def __repr__(self) -> str:
        """The recording that is shown, for front ends that cannot draw widgets."""
        return f"KernelRunView({self._run!r})"

    def _ipython_display_(self) -> None:
        """Show the widget, and below it the numbers that stay in a saved notebook."""
        if (found := super()._repr_mimebundle_()) is not None:
            self._still.show(found[0] | {"text/plain": repr(self)})

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and a table of numbers for pages that cannot run it."""
        found = super()._repr_mimebundle_(**kwargs)
        if found is not None:
            found[0]["text/html"] = run_html(self._run)
        return found

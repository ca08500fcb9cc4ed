"""The cursor that the views of one trace share: it can be read, set, watched and linked from Python."""

from __future__ import annotations

from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary, ref

import param


class Cursor(param.Parameterized):
    """The place in a run that views show. ``cursor.step = 12`` moves every view that shares it.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 5}]})
        >>> cursor = cursor_of(trace)
        >>> cursor.step = 3
        >>> cursor_of(trace).step
        3
    """

    step = param.Integer(
        default=None, allow_None=True, bounds=(0, None), doc="Number of the step; None before it moves."
    )
    follow = param.Boolean(default=True, doc="Whether views stay on the newest step of a live run.")
    request = param.String(default=None, allow_None=True, doc="Id of the selected request; None for none.")
    range = param.Range(default=None, allow_None=True, doc="Visible steps, first and end; None for all.")

    def to_view(self) -> dict[str, Any]:
        """The values as a view gets them; without a range for as long as nobody has chosen one."""
        values = {"step": self.step, "follow": self.follow, "request": self.request}
        if self.range is None and not self._ranged:
            return values
        self._ranged = True
        return {**values, "range": None if self.range is None else list(self.range)}

    _ranged = False

    def take(self, values: dict[str, Any]) -> None:
        """Take the values that a view has sent; others are ignored."""
        step, request = values.get("step"), values.get("request")
        valid = step is None or (isinstance(step, int) and not isinstance(step, bool) and step >= 0)
        if valid and (request is None or isinstance(request, str)):
            place = {"step": step, "follow": bool(values.get("follow")), "request": request}
            visible = {"range": _range_of(values["range"])} if "range" in values else {}
            self.param.update(**place, **visible)

    def link(self, view: Any) -> None:
        """Keep a view's ``cursor`` and ``step`` equal to this one, in both directions.

        Args:
            view: A widget with traits, or a Panel component with parameters, called ``cursor`` and ``step``.
        """
        is_placed = any(value is not None for value in (self.step, self.request, self.range))
        view.cursor = self.to_view() if is_placed else {}
        view.step = self.step
        watcher = view.observe if hasattr(view, "observe") else view.param.watch
        moved_itself = False

        # A view sends its cursor, then its step. A slow server takes several of them at once: a step that comes with a
        # cursor is that of the same place or of one before. Told it, the view would return to a place that it left.
        def take(*changes: Any) -> None:
            nonlocal moved_itself
            new = {change.name: change.new for change in changes}
            if "cursor" not in new:
                if new["step"] not in (None, self.step):
                    self.param.update(step=new["step"], follow=False)
                return
            moved_itself = True
            try:
                if new["cursor"]:
                    self.take(new["cursor"])
            finally:
                moved_itself = False

        watcher(take, ["cursor", "step"])

        # Weakly, because a cursor lives as long as its trace and must not keep each page that was ever open.
        weak_view = ref(view)

        def show(*_: Any) -> None:
            linked = weak_view()
            if linked is None:
                self.param.unwatch(watching)
                return
            if (values := self.to_view()) != linked.cursor:
                linked.cursor = values
            if self.step is not None and not moved_itself:
                linked.step = self.step

        watching = self.param.watch(show, ["step", "follow", "request", "range"])


def _range_of(values: Any) -> tuple[float, float] | None:
    """The range that a view has sent; None for all steps, and for what is not a range."""
    if not isinstance(values, (list, tuple)) or len(values) != 2:
        return None
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) for value in values):
        return None
    return (float(values[0]), float(values[1])) if values[0] < values[1] else None


_CURSORS: WeakKeyDictionary[Any, Cursor] = WeakKeyDictionary()


def cursor_of(source: Any) -> Cursor:
    """The cursor of a trace, or of an engine's trace; always the same object.

    Args:
        source: A Trace, or a controller with a ``trace``, such as an Engine.
    """
    trace = getattr(source, "trace", source)
    return _CURSORS.setdefault(trace, Cursor())

"""Laws that hold for every scheduler after every step, as data that tests, traces, the engine and the docs read.

Three ways to check a run, each up to the first broken law or to its end:

- Our scheduler: ``CheckedScheduler`` (`workbench/scheduler/checked.py`) raises `LawError` in the step that breaks a
  law; with ``on_broken=`` it reports and continues, and ``scheduler.checker.broken`` has what was found.
- A trace: ``trace.check()``.
- Any other scheduler, while it runs: one `Checker` per run. Its records alone are enough; with a `SchedulerState` (the
  block tables and the free blocks, the rest if it is known) its books are compared too.

      checker = Checker(Limits.of(config), allow_exceptions=False)  # config: fields of EngineConfig by name
      checker.add(request)  # a RequestInfo, when it arrives
      broken = checker.step(record, state)  # after each step; [] while the laws hold
      checker.crashed(step, problem)  # the scheduler raised

  ``scheduled(step, state)`` and ``updated(step, latest, finish_reasons, state)`` take the two halves of a step that is
  not a record yet; with ``names_changes=False`` its chunks need not name the changes of block tables.
"""

from workbench.trace.laws.checker import Checker
from workbench.trace.laws.law import EXCEPTIONS, LAWS, Broken, Law, LawError, NamedException
from workbench.trace.laws.replay import check
from workbench.trace.laws.rules import RULES, Rule
from workbench.trace.laws.state import Limits, RequestState, SchedulerState

__all__ = [
    "EXCEPTIONS",
    "LAWS",
    "RULES",
    "Broken",
    "Checker",
    "Law",
    "LawError",
    "Limits",
    "NamedException",
    "RequestState",
    "Rule",
    "SchedulerState",
    "check",
]

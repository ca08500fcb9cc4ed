"""Laws that hold for every scheduler after every step, as data that tests, traces, the engine and the docs read."""

from workbench.laws.checker import Checker
from workbench.laws.law import EXCEPTIONS, LAWS, Broken, Law, LawError, NamedException
from workbench.laws.replay import check
from workbench.laws.rules import RULES, Rule
from workbench.laws.state import Limits, SchedulerState

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
    "Rule",
    "SchedulerState",
    "check",
]

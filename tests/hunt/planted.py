"""Schedulers with a fault, for the hunt to find."""

from workbench.analysis.hunt.own import OwnScheduler
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.scheduler import Scheduler

__version__ = "0.1"


class Generous(Scheduler):
    """Gives one token more than the budget."""

    def _configure(self, config):
        super()._configure(config)
        self._token_budget += 1


class Forgetful(Scheduler):
    """Loses a request that is preempted."""

    def _preempt(self, victim):
        super()._preempt(victim)
        self.queues.waiting.remove(victim)


def generous(config):
    return OwnScheduler(config, make=Generous)


def forgetful(config):
    return OwnScheduler(config, make=Forgetful)


def hoarding(config):
    """Leaves the hashes of a chunk that is taken back in the prefix cache."""
    made = OwnScheduler(config)
    made.scheduler.kv_cache.evict_newly_cached = lambda request, num_computed: set()
    return made


class Endless(Scheduler):
    """Waits for a block that it has just given back."""

    def _preempt(self, victim):
        super()._preempt(victim)
        while not victim.block_table:
            pass


def endless(config):
    return OwnScheduler(config, make=Endless)


def older(config):
    """Does not have a setting."""
    made = OwnScheduler(config)
    made.dropped = ["watermark"]
    return made


def bare(config):
    """Says that it has a prefix cache, and nothing else."""
    return OwnScheduler(config)


bare.features = ("caching",)
older.features = ("caching", "caps", "pools")
generous.features = forgetful.features = endless.features = ("caching", "caps", "pools")
hoarding.features = ("caching", "priority", "caps", "pools")


class Confused(SchedulingPolicy):
    """Fails as soon as two requests wait."""

    def waiting_order(self, view):
        if len(view.waiting) > 1:
            raise KeyError("no such request")
        return view.waiting

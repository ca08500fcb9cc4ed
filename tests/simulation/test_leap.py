"""A simulation that schedules several decodes at once gives the values of one that goes step by step."""

from __future__ import annotations

from random import Random

import pytest

from workbench.analysis.rerun import Outcome, RecordedRun
from workbench.config import EngineConfig, SamplingParams
from workbench.simulation.arrivals import timed_arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.step_noise import StepNoise
from workbench.simulation.leap import LeapingRun

STOP = 2**31 - 1


def workload(random: Random) -> tuple[RecordedRun, EngineConfig]:
    """A random run: shared prefixes, bursts, aborts, ends by length and by stop tokens, small pools."""
    block_size = random.choice([4, 16])
    config = EngineConfig(
        max_num_batched_tokens=random.choice([16, 64, 256]),
        max_num_seqs=random.choice([2, 4, 16]),
        block_size=block_size,
        num_blocks=random.choice([200, 400, 2000]) // block_size + 2,
        max_model_len=random.choice([None, 190]),
        enable_prefix_caching=random.random() < 0.7,
        async_scheduling=random.random() < 0.5,
        long_prefill_token_threshold=random.choice([0, 0, 12]),
        policy=random.choice(["fcfs", "priority"]),
    )
    arrivals, outputs, now = [], {}, 0.0
    common = [random.randrange(3, 9) for _ in range(60)]
    for number in range(random.randrange(4, 30)):
        now += random.expovariate(3.0) if random.random() < 0.7 else 0.0
        prompt = common[: random.randrange(60)] + [random.randrange(3, 9) for _ in range(random.randrange(1, 60))]
        output = [random.randrange(3, 32000) for _ in range(random.randrange(1, 70))]
        stops = random.random() < 0.5
        if stops:
            output[-1] = STOP
        if random.random() < 0.4:
            common = [*prompt, *output][-120:]
        name = f"r{number}"
        arrival = timed_arrival(name, prompt, len(output), now)
        sampling = SamplingParams(max_tokens=len(output) + 5, stop_token_ids=(STOP,)) if stops else arrival.sampling
        object.__setattr__(arrival, "sampling", sampling)
        object.__setattr__(arrival, "priority", random.randrange(3))
        arrivals.append(arrival)
        outputs[name] = output
    noise = StepNoise([random.gauss(0.0, 0.03) for _ in range(200)], 0.5)
    model = CostModel(fixed=0.02, per_sequence=0.001, per_prefill_token=1e-4, per_kv_token=1e-6)
    drift = random.choice([Drift(), Drift(change=0.3, error=0.01, num_rows=4000)])
    largest = {"sequences": 3, "rows": 20, "kv_tokens": 300}
    for arrival in arrivals:
        if random.random() < 0.2:
            object.__setattr__(arrival, "abort_step", 0)
            object.__setattr__(arrival, "timeout", random.expovariate(1.0))
    return RecordedRun(arrivals, outputs, True, 10**6, model, [model], drift, noise, largest), config


def both_ways(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome | str, Outcome | str, int]:
    """The outcome with leaps and step by step, and the number of leaps of at least two steps."""
    run, config = workload(Random(seed))
    num_leaps, found = 0, []
    leap = LeapingRun._leap

    def counting(self: LeapingRun, most: int, sample_token: object) -> object:
        nonlocal num_leaps
        num_leaps += 1
        return leap(self, most, sample_token)  # type: ignore[arg-type]

    for steps in (counting, None):
        with monkeypatch.context() as patch:
            if steps is None:
                patch.setattr(LeapingRun, "_num_steady_steps", lambda self: 0)
            else:
                patch.setattr(LeapingRun, "_leap", steps)
            try:
                found.append(run.outcome(config, 0))
            except ValueError as problem:
                found.append(str(problem))
    return found[0], found[1], num_leaps


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("first", range(0, 120, 40))
def test_leaps_change_no_value(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_leaps = 0
    for seed in range(first, first + 40):
        leaping, stepping, count = both_ways(seed, monkeypatch)
        assert leaping == stepping, seed
        num_leaps += count
    assert num_leaps > 400


def test_a_block_that_is_cached_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the blocks that a leap fills, hits of later requests are lost."""
    manager = "workbench.scheduler.kv_cache_manager.KVCacheManager.cache_full_blocks"
    from workbench.scheduler.kv_cache_manager import KVCacheManager

    whole = KVCacheManager.cache_full_blocks

    def late(self: KVCacheManager, request: object, num_computed: int) -> None:
        import sys

        if "leap.py" not in sys._getframe(1).f_code.co_filename:
            whole(self, request, num_computed)  # type: ignore[arg-type]

    monkeypatch.setattr(manager, late)
    assert any(both_ways(seed, monkeypatch)[0] != both_ways(seed, monkeypatch)[1] for seed in range(40))

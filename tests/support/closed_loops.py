"""Workloads of people and agents who wait for an answer before they ask again, with a known truth."""

from dataclasses import replace

from workbench import CostModel, EngineConfig
from workbench.simulation.arrivals import timed_arrival
from workbench.simulation.simulate import next_token, simulate_requests
from workbench.simulation.workload import made_up_token

COST = CostModel(fixed=0.02, per_prefill_token=4e-4, per_kv_token=2e-7, per_sequence=5e-4)


def conversations(rng, *, count=8, think=0.3, output=(6, 40), clock=True):
    """Conversations behind shared system prompts; each turn repeats all that was said, with the answers."""
    systems = [[rng.randrange(3, 30_000) for _ in range(rng.randint(30, 90))] for _ in range(2)]
    arrivals = []
    for number in range(count):
        said, name, at = list(rng.choice(systems)), "", rng.uniform(0, 4)
        for turn in range(rng.randint(1, 6)):
            said = said + [rng.randrange(3, 30_000) for _ in range(rng.randint(9, 120))]
            after, name, length = name, f"user{number}-turn{turn}", rng.randint(*output)
            arrival = timed_arrival(name, said, length, at)
            if after:
                arrival = replace(arrival, after=after, think=rng.uniform(0, think), think_steps=rng.randint(0, 5))
            arrivals.append(arrival if clock else replace(arrival, arrives_at=None, arrival_step=int(10 * at)))
            said = said + [made_up_token(f"{name}:{len(said) + place}") for place in range(length)]
    return arrivals


def run(arrivals, cost=COST, **config):
    """The run of a workload, whose requests wait for each other."""
    settings = {"block_size": 4, "num_blocks": 3000, "max_num_batched_tokens": 256, "max_num_seqs": 6} | config
    return simulate_requests(EngineConfig(**settings), arrivals, next_token, cost_model=cost)

"""The prompt lengths for which prefill and decode apart are worth it: the same replicas, apart and together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.analysis.fleet.simulate import run_fleet
from workbench.analysis.fleet.split import Split
from workbench.analysis.values import latency_values
from workbench.base.field_checks import integer, number
from workbench.base.on_demand import find
from workbench.base.tables import table_lines, terminal_width, wrapped
from workbench.base.text import counted, duration, significant
from workbench.config import EngineConfig
from workbench.scheduler.admission import check_servable
from workbench.simulation.arrivals import poisson, timed_arrival
from workbench.simulation.costs.cost_model import CostModel

VALUES = ("e2e_mean", "ttft_mean", "itl_p99")

EQUAL = 0.01
"""A layout is better for a length if its latency is shorter by more than this share."""


@dataclass(frozen=True)
class Length:
    """The comparison for one prompt length.

    Attributes:
        num_tokens: Tokens of each prompt.
        rate: Requests per second.
        together: Latencies of replicas that do both, in seconds by name.
        apart: Those with prefill and decode apart.
    """

    num_tokens: int
    rate: float
    together: dict[str, float]
    apart: dict[str, float]

    def ratio(self, name: str) -> float:
        """A latency apart, as a multiple of that together; below 1 it is worth it."""
        return self.apart[name] / self.together[name]


@dataclass(frozen=True)
class Crossover:
    """Prompt lengths with both layouts.

    Attributes:
        lengths: The comparisons, by length.
        replicas: Number of all replicas, and of those that decode.
    """

    lengths: list[Length]
    replicas: tuple[int, int]

    def worth(self, name: str = "e2e_mean") -> list[int]:
        """The prompt lengths that gain by it, by more than `EQUAL`."""
        return [length.num_tokens for length in self.lengths if length.ratio(name) < 1 - EQUAL]

    def to_svg(self) -> str:
        """The latencies apart, as multiples of those together, over the prompt length."""
        lines = {name: [length.ratio(name) for length in self.lengths] for name in VALUES}
        across = [length.num_tokens for length in self.lengths]
        svg: str = find("Crossover.to_svg")(across, lines, ("prompt tokens", "apart / together"), level=1.0)
        return svg

    def __repr__(self) -> str:
        names = [name for value in VALUES for name in (f"{value} together", f"{value} apart")]
        rows = [["prompt", "requests/s", *names]]
        for length in self.lengths:
            pairs = [duration(side[name]) for name in VALUES for side in (length.together, length.apart)]
            rows.append([counted(length.num_tokens, "token"), significant(length.rate), *pairs])
        count, decoding = self.replicas
        width = terminal_width()
        lines = table_lines(rows, width=width)
        for name in VALUES:
            lengths = [f"{length:,}" for length in self.worth(name)]
            worth = f"prompts of {' or '.join(lengths)} tokens" if lengths else "none of these prompts"
            line = f"{name}: {count - decoding} that prefill and {decoding} that decode are better for {worth}"
            lines += wrapped(line, width)
        return "\n".join([*lines, *wrapped(f"a difference of less than {EQUAL:.0%} counts as none", width)])


def crossover(
    lengths: Sequence[int],
    split: Split,
    *,
    replicas: int,
    config: EngineConfig,
    cost_model: CostModel,
    output: int = 100,
    tokens_per_second: float = 4000.0,
    num_requests: int = 200,
    seed: int = 0,
) -> Crossover:
    """Compare ``replicas + split.replicas`` replicas, apart and together, for prompts of several lengths.

    Requests arrive independently of each other, so many that the fleet gets the same number of prompt and output tokens
    per second at every length. Prompts share nothing.

    Args:
        lengths: Tokens of a prompt.
        split: The pool that decodes, and the way to it.
        replicas: Number of replicas that prefill.
        config: Configuration of every replica.
        cost_model: Duration of a step.
        output: Tokens of an answer.
        tokens_per_second: Prompt and output tokens that arrive for each replica in a second.
        num_requests: Number of requests for each length.
        seed: Seed of the arrivals.

    Raises:
        ValueError: An argument is outside its range, or a request cannot be served.
    """
    number("tokens_per_second", tokens_per_second, 0.0, low_open=True)
    count = integer("replicas", replicas, 1) + split.replicas
    for one in (config, config.replace(**split.config)):  # before anything is simulated
        check_servable(one, max(lengths, default=1), integer("output", output, 1), "the longest of lengths")
    found = []
    for length in sorted(lengths):
        rate = tokens_per_second * count / (integer("a length", length, 1) + integer("output", output, 1))
        times = poisson(rate, random.Random(f"crossover {seed}"))
        arrivals = [
            timed_arrival(f"r{index}", [index] * length, output, time)
            for index, time in zip(range(num_requests), times)
        ]
        together = run_fleet(arrivals, [config] * count, [cost_model] * count, router="least_loaded", seed=seed)
        configs = [config] * replicas + [config.replace(**split.config)] * split.replicas
        apart = run_fleet(
            arrivals, configs, [cost_model] * count, router="least_loaded", seed=seed, split=replace(split)
        )
        values = [latency_values(run.metrics()) for run in (together, apart)]
        found.append(Length(length, rate, *({name: one[name] for name in VALUES} for one in values)))
    return Crossover(found, (count, split.replicas))

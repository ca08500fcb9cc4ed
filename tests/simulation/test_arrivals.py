"""Arrival processes, length distributions and recorded workloads."""

import json
import random
from itertools import islice

import numpy as np
import pytest

from workbench.simulation.arrivals import (
    bursts,
    evenly,
    poisson,
    read_generated,
    read_lengths,
    read_mooncake,
    read_sharegpt,
)


def test_poisson_has_its_rate_and_spread():
    times = np.array(list(islice(poisson(5.0, random.Random(0)), 20_000)))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(0.2, rel=0.03)


def test_bursts_come_together_at_the_same_rate():
    times = list(islice(bursts(5.0, 10, random.Random(0)), 20_000))
    assert len(set(times)) == 2000 and len(times) / times[-1] == pytest.approx(5, rel=0.05)
    assert list(islice(evenly(4.0), 3)) == [0, 0.25, 0.5]


def test_lengths():
    rng = random.Random(0)
    lognormal = read_lengths("prompt", {"lognormal": {"median": 200, "sigma": 0.7, "min": 10, "max": 900}})
    drawn = [lognormal(rng) for _ in range(5000)]
    assert np.median(drawn) == pytest.approx(200, rel=0.05) and min(drawn) >= 10 and max(drawn) == 900
    mixed = read_lengths("prompt", {"choices": [[80, 5], [20, 50]]})
    assert [mixed(rng) for _ in range(5000)].count(50) == pytest.approx(1000, rel=0.1)
    assert {read_lengths("x", {"uniform": [3, 5]})(rng) for _ in range(100)} == {3, 4, 5}
    assert read_lengths("x", 7)(rng) == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "output must be from 1"),
        (True, "output must be a number of tokens"),
        ("9", "output must be a number of tokens"),
        ({"uniform": [5, 3]}, r"output.uniform\[1\] must be from 5 to .*, got 3"),
        ({"choices": []}, "output must be a number of tokens"),
        ({"choices": [3]}, "output must be a number of tokens"),
        ({"choices": [[-1, 3]]}, "output.choices weight must be >= 0"),
        ({"lognormal": {"sigma": 1}}, "output.lognormal.median must be a number"),
        ({"lognormal": {"median": 5, "sigma": 1, "mean": 5}}, "output must be a number of tokens"),
    ],
)
def test_malformed_lengths(spec, message):
    with pytest.raises(ValueError, match=message):
        read_lengths("output", spec)


def test_generated_requests_are_the_same_every_time_and_share_no_prefix():
    spec = {
        "num_requests": 50,
        "seed": 3,
        "prompt": {"uniform": [20, 90]},
        "output": {"uniform": [1, 9]},
        "arrivals": {"process": "poisson", "rate": 2},
    }
    first, again = list(read_generated(spec)), list(read_generated(spec))
    assert first == again != list(read_generated({**spec, "seed": 4}))
    assert len({arrival.prompt_token_ids[0] for arrival in first}) == len(first) == 50
    times = [arrival.arrives_at for arrival in first]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_requests": 0}, "generate.num_requests must be from 1|generate.num_requests must be >= 1"),
        ({"arrivals": {"process": "weibull"}}, 'process must be "poisson", "bursts", "evenly" or "at_once"'),
        ({"arrivals": {"process": "poisson", "rate": 0}}, "generate.arrivals.rate must be > 0"),
        ({"arrivals": {"process": "bursts", "rate": 1}}, "generate.arrivals.size must be an integer"),
        ({"arrivals": 3}, "generate.arrivals must be an object"),
        ({"lengths": 3}, "generate has an unknown field 'lengths'; the fields are num_requests"),
    ],
)
def test_malformed_descriptions(change, message):
    spec = {"num_requests": 5, "prompt": 5, "output": 5} | change
    with pytest.raises(ValueError, match=message):
        list(read_generated(spec))


def test_mooncake_prompts_share_what_their_hash_ids_share(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 0, "hash_ids": [1, 2, 9]},
        {"timestamp": 3500, "input_length": 20, "output_length": 5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b, c = read_mooncake(path, speed=2)
    assert [len(x.prompt_token_ids) for x in (a, b, c)] == [1100, 1500, 20]
    assert [x.arrives_at for x in (a, b, c)] == [0, 1.5, 1.75]
    assert (
        a.prompt_token_ids[:1024] == b.prompt_token_ids[:1024] and a.prompt_token_ids[1024] != b.prompt_token_ids[1024]
    )
    assert [x.sampling.max_tokens for x in (a, b, c)] == [7, 1, 5]
    path.write_text('{"timestamp": 0, "input_length": -4}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 1: input_length must be from 1"):
        list(read_mooncake(path))


def test_sharegpt_takes_question_and_answer(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80}, {"from": "human", "value": "z"}]
    lines = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": turns}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_sharegpt(path, evenly(1.0))
    assert (len(first.prompt_token_ids), first.sampling.max_tokens) == (100, 20)
    assert (second.request_id, second.arrives_at) == ("r2", 1.0)
    counted, _ = read_sharegpt(path, evenly(1.0), count_tokens=len)
    assert len(counted.prompt_token_ids) == 400
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: must be an object"):
        list(read_sharegpt(path, evenly(1.0)))

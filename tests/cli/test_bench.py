"""The requests of ``workbench bench``, and its refusals."""

import json
import random

import pytest

from tests.cli.test_cli import run
from workbench.apps.bench.datasets import sharegpt_requests, sonnet_requests


def encode(text):
    """A token for every character, so that a test can read a prompt."""
    return [ord(letter) for letter in text]


def test_sonnets_prompts_share_a_beginning_and_are_filled_with_whole_lines(tmp_path):
    rng = random.Random(4)
    lines = ["".join(rng.choices("abcdef ", k=rng.randrange(20, 50))).strip() + "." for _ in range(40)]
    path = tmp_path / "poem.txt"
    path.write_text("\n".join(lines))
    requests = sonnet_requests(path, encode, 9, 400, 7, seed=1)
    texts = ["".join(map(chr, request.prompt)) for request in requests]
    assert len(set(texts)) == 9 and {request.output_len for request in requests} == {7}
    assert all(350 <= len(text) <= 400 and set(text.splitlines()) <= set(lines) for text in texts)
    shared = texts[0][: min(i for i, pair in enumerate(zip(texts[0], texts[1])) if len(set(pair)) > 1)]
    first = "".join(f"{line}\n" for line in lines)
    assert len(shared) >= 150 and first.startswith(shared[:150])
    assert requests == sonnet_requests(path, encode, 9, 400, 7, seed=1) != sonnet_requests(path, encode, 9, 400, 7, 2)


def test_sharegpt_takes_first_turns_of_usual_lengths(tmp_path):
    lengths = [(9, 5), (3, 50), (1025, 5), (1000, 1049), (8, 4)]
    entries = [{"conversations": [{"value": "q" * q}, {"value": "a" * a}, {"value": "more"}]} for q, a in lengths]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}, {"id": 3}]))
    requests = sharegpt_requests(path, encode, 9, seed=0)
    assert sorted((len(request.prompt), request.output_len) for request in requests) == [(8, 4), (9, 5)]


@pytest.mark.parametrize("text", ["{", "[3]", '{"a": 1}', '[{"conversations": [{}, {}]}]', '[{"conversations": 3}]'])
def test_another_format_is_refused_with_an_example(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"not ShareGPT's format, \[\{"):
        sharegpt_requests(path, encode, 9, seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset-name", "sonnet"], "--dataset-name sonnet needs --dataset-path FILE"),
        (["--dataset-path", "x"], "--dataset-name random has no file; leave out --dataset-path FILE"),
        (["--metric-percentiles", "50,x"], "must be numbers from 0 to 100 such as 50,90,99, got '50,x'"),
        (["--metric-percentiles", "101"], "must be numbers from 0 to 100 such as 50,90,99, got '101'"),
        (["--request-rate", "0"], "--request-rate must be > 0 and finite, got 0"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(options, words):
    finished = run("bench", *options)
    assert finished.returncode == 2 and words in finished.stderr and "Traceback" not in finished.stderr

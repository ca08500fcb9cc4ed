"""Files and options that appear in messages: shortened, on one line, without characters that steer a terminal."""

import json

import pytest

from workbench.apps.cli import main
from workbench.base.text import printable, shown
from workbench.config import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    "request_fields",
    [
        {"prompt": "x" * 1_000_000},
        {"prompt": {"len": "x" * 1_000_000}},
        {"prompt": [0, "x" * 1_000_000]},
        {"prompt": {"len": 5}, "max_tokens": "x" * 1_000_000},
        {"prompt": {"len": 5}, "max_tokens": 10**4000},
        {"prompt": {"len": 5}, "x" * 1_000_000: 1},
        {"prompt": {"parts": "x" * 1_000_000}},
        {"prompt": {"len": 5}, "priority": ["x" * 1_000_000]},
    ],
)
def test_a_workload_is_not_echoed(tmp_path, capsys, request_fields):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"requests": [{"id": "a", **request_fields}]}))
    assert main(["simulate", str(path)]) == 2
    message = capsys.readouterr().err
    assert 20 < len(message) < 2100 and message.count("\n") == 1


def test_a_name_with_line_breaks_is_one_line(tmp_path, capsys):
    path = tmp_path / "a\nserving \x1b[31mb\r.json"
    assert main(["simulate", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "\x1b" not in message and "\r" not in message and "a\\nserving" in message


def test_values_are_shown_short():
    assert shown("abc") == "'abc'" and shown(7) == "7" and shown([1, 2]) == "[1, 2]"
    assert len(shown("x" * 10**7)) < 200 and len(shown(list(range(10**6)))) < 200 and "bits" in shown(10**5000)
    assert printable("a\x1b\u2028\ud800é日") == "a\\x1b\\u2028\\ud800é日"


@pytest.mark.parametrize("value", [5e-324, 1e-320, 1e-300, 1.7e308])
def test_factors_that_no_logit_survives_are_refused(value):
    with pytest.raises(ValueError, match=r"repetition_penalty must be from 1e-100 to 1e\+100, got"):
        SamplingParams(repetition_penalty=value)
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or from 1e-100 to 1e\+100, got"):
        SamplingParams(temperature=value)
    assert SamplingParams(temperature=0).temperature == 0
    with pytest.raises(ValueError, match="seed must be from 0"):
        EngineConfig(seed=10**5000)

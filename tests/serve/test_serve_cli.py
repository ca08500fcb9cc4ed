"""`workbench serve` as a user starts it: a process, a model file, an API key in the environment, SIGTERM."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest
from gguf_files import random_model, tiny_config, write_model
from serve_helpers import ServerProcess

from workbench.apps.cli.serve import _engine_config, add_parser

KEY = "secret-key-1"
NAME = "ti\nny"


def command(*options):
    return (sys.executable, "-m", "workbench", "serve", *options)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A random model of a few thousand parameters with a byte-level tokenizer, as a GGUF file."""
    path = tmp_path_factory.mktemp("models") / f"{NAME}.gguf"
    config = tiny_config("llama")
    write_model(path, "llama", config, random_model(config))
    return path


def test_the_options_of_speculation_say_what_is_missing(capsys):
    def configured(*options):
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        return _engine_config(parser.parse_args(["serve", "--model", "m", *options]))

    config, draft_model = configured("--speculative-config", '{"num_speculative_tokens": 3, "model": "small"}')
    assert (config.num_speculative_tokens, config.speculation.method, draft_model) == (3, "draft_model", "small")
    config, draft_model = configured("--draft-model", "other", "--speculative-config", '{"num_speculative_tokens": 1}')
    assert (config.speculation.method, draft_model) == ("draft_model", "other")
    assert configured("--set", "num_speculative_tokens=2", "--draft-model", "other")[1] == "other"
    assert configured()[1] is None
    for options, message in (
        (["--draft-model", "other"], "--draft-model other needs the number of drafts"),
        (["--speculative-config", '{"num_speculative_tokens": 1, "tree": 2}'], "unknown key 'tree'"),
    ):
        with pytest.raises(ValueError, match=message):
            configured(*options)
    with pytest.raises(SystemExit):
        configured("--speculative-config", "4")
    assert "expected a JSON object with num_speculative_tokens" in capsys.readouterr().err


def test_a_process_serves_a_file_and_ends_on_sigterm(model_file):
    server = ServerProcess(
        *command("--model", str(model_file), "--port", "0", "--max-num-seqs", "4", "--keep-steps", "50"),
        *("--set", "async_scheduling=true", "--weights", "float32", "--speculative-config"),
        '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}',
        environment=os.environ | {"WORKBENCH_API_KEY": KEY},
    )
    bearer = {"Authorization": f"Bearer {KEY}"}
    try:
        assert server.address.startswith("serving ti\\nny on http://127.0.0.1:") and KEY not in server.address
        assert server.ask("GET", "/v1/models")[0] == 401
        assert json.loads(server.ask("GET", "/v1/models", headers=bearer)[2])["data"][0]["id"] == NAME
        body = {"prompt": "the end", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        status, _, text = server.ask("POST", "/v1/completions", body, bearer)
        usage = json.loads(text)["usage"]
        assert status == 200 and (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 5)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        status, _, text = server.ask("POST", "/v1/chat/completions", body, bearer)
        assert status == 400 and "no chat template" in json.loads(text)["error"]["message"]
        for _ in range(70):
            server.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 1}, bearer)
        stream = server.openai(api_key=KEY).completions.create(
            model=NAME, prompt=[7, 8, 9], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        parts = iter(stream)
        next(parts)
        server.process.send_signal(signal.SIGTERM)
        *_, last = parts
        assert last.choices[0].finish_reason == "length", "requests that are open at SIGTERM are answered to their end"
    finally:
        server.end()
    assert server.process.returncode == 0 and "Traceback" not in server.errors, server.errors


@pytest.mark.parametrize(
    "options, message",
    [
        (["--host", "0.0.0.0"], "give --api-key KEY, or --insecure"),
        (["--api-key", "short"], "at least 8 characters"),
        (["--port", "70000"], "port must be from 0 to 65535, got 70000"),
        (
            ["--set", "max_seqs=4"],
            "--set 'max_seqs=4': unknown field 'max_seqs' (did you mean max_num_seqs?); similar ones are max_",
        ),
        (["--set", "block_size=0"], "block_size must be"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(options, message, model_file):
    result = subprocess.run(command("--model", str(model_file), *options), capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr

"""Adapters (LoRA) over HTTP: a request's model names one."""

import json
import shutil

import pytest
from random_adapters import linear_sizes, make_adapter
from serve_helpers import ServerProcess
from word_llama import make_tiny_llama

ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, "num_blocks": 400, "max_loras": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    sizes = linear_sizes(make_tiny_llama().model)
    modules = {name: str(make_adapter(folder / name, sizes, seed=seed)) for seed, name in enumerate(("a", "b", "bad"))}
    process = ServerProcess(engine=ENGINE, adapters=modules)
    yield process, folder
    process.end()


def ask(server, model, path="/v1/completions"):
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, _, text = server.ask("POST", path, body | {"return_token_ids": True})
    return status, json.loads(text)


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_models_lists_the_adapters_and_a_request_gets_the_one_that_it_names(server):
    process, _ = server
    listed = json.loads(process.ask("GET", "/v1/models", None)[2])["data"]
    assert [(card["id"], card.get("parent")) for card in listed] == [
        ("tiny-llama", None), *((name, "tiny-llama") for name in ("a", "b", "bad"))
    ]  # fmt: skip
    assert json.loads(process.ask("GET", "/v1/models/b", None)[2])["parent"] == "tiny-llama"
    answers = {name: ask(process, name) for name in ("tiny-llama", "a", "b")}
    assert all(status == 200 and answer["model"] == name for name, (status, answer) in answers.items())
    assert len({tuple(tokens(answer)) for _, answer in answers.values()}) == 3
    assert tokens(ask(process, "a")[1]) == tokens(answers["a"][1])  # b took its place in between


def test_an_unknown_name_is_refused_with_those_that_exist(server):
    status, answer = ask(server[0], "c")
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert all(repr(name) in answer["error"]["message"] for name in ("tiny-llama", "a", "b"))


def test_files_that_are_damaged_later_end_their_requests_and_no_others(server):
    process, folder = server
    before = tokens(ask(process, "a")[1])  # "bad" is not in memory now
    shutil.rmtree(folder / "bad")
    status, answer = ask(process, "bad")
    assert status == 400 and "the files of adapter 'bad' cannot be read" in answer["error"]["message"]
    assert tokens(ask(process, "a")[1]) == before

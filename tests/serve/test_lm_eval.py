"""lm-eval scores a task against the server as the engine does directly.

`make test-clients` installs it into an environment, and names its Python in LM_EVAL_PYTHON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serve_helpers import ServerProcess

from workbench import Engine, EngineConfig, SamplingParams

PYTHON = os.environ.get("LM_EVAL_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LM_EVAL_PYTHON names no Python with lm-eval: make test-clients")

DOCUMENTS = [
    {"question": "The capital of France is", "choices": [" Paris", " a banana", " Berlin"], "label": 0},
    {"question": "Two plus two equals", "choices": [" nine hundred", " four"], "label": 1},
    {"question": "Water is made of hydrogen and", "choices": [" oxygen.", " iron.", " wood."], "label": 0},
    {"question": "The opposite of hot is", "choices": [" blue", " seven", " cold"], "label": 2},
    {"question": "A dog is an", "choices": [" animal", " number"], "label": 0},
    {"question": "The sun rises in the", "choices": [" bathtub", " east"], "label": 1},
]
TASK = """
task: made_up
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def direct_scores():
    """For each choice the sum of the log-probabilities of its tokens behind the question, by the engine."""
    with Engine("smollm2", EngineConfig(num_blocks=512)) as engine:
        encode, scores = engine.tokenizer.encode, []
        for document in DOCUMENTS:
            start = len(encode(document["question"]))
            for choice in document["choices"]:
                tokens = encode(document["question"] + choice)
                sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
                engine.add_request(tokens, sampling)
                (output,) = engine.run(progress=False)
                near = output.prompt_logprobs
                scores.append(sum(near[i][tokens[i]] for i in range(start, len(tokens))))
        return scores, engine.model.tokenizer.serialized()


def test_a_task_has_the_engines_scores(tmp_path):
    expected, tokenizer = direct_scores()
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (tmp_path / "made_up.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    server = ServerProcess(sys.executable, "-m", "workbench", "serve", "--model", "smollm2", "--port", "0")
    try:
        arguments = f"model=smollm2,base_url=http://127.0.0.1:{server.port}/v1/completions,tokenizer={folder}"
        command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--tasks", "made_up", "--log_samples"]
        command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--model_args", arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        subprocess.run(command, check=True, env=environment, timeout=240, cwd=tmp_path)
    finally:
        server.end()
    (results,) = Path(tmp_path / "out").rglob("results*.json")
    (samples,) = Path(tmp_path / "out").rglob("samples*.jsonl")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    found = [float(answer[0][0]) for line in lines for answer in line["resps"]]
    assert found == pytest.approx(expected, abs=1e-3)
    right, first = 0, 0
    for document in DOCUMENTS:
        scores = expected[first : first + len(document["choices"])]
        right += scores.index(max(scores)) == document["label"]
        first += len(scores)
    accuracy = json.loads(results.read_text())["results"]["made_up"]["acc,none"]
    assert accuracy == pytest.approx(right / len(DOCUMENTS)) and right > len(DOCUMENTS) // 2

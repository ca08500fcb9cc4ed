"""A server of SGLang on the CPU, with a made-up model, which finds the recorder as a plug-in and is recorded."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here: make test-sglang", allow_module_level=True)

from workbench.trace import Trace

ROOT = Path(__file__).parents[2]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The second plug-in is for machines whose NUMA node SGLang cannot find.
PLUG_INS = """[sglang.srt.plugins]
workbench = workbench.trace.recorders.sglang:register
anywhere = on_any_machine:register
"""

ON_ANY_MACHINE = """
def register():
    from sglang.srt.distributed import bootstrap
    bootstrap._bind_threads_if_cpu = lambda *_, **__: ""
"""

OPTIONS = "--device cpu --load-format dummy --dtype float32 --attention-backend torch_native --sampling-backend pytorch"
OPTIONS += " --grammar-backend none --max-total-tokens 2048 --max-running-requests 8 --chunked-prefill-size 64"
OPTIONS += " --skip-tokenizer-init --skip-server-warmup --host 127.0.0.1"

START_SECONDS = 400


class Server:
    """A server with the plug-in, and its log."""

    def __init__(self, folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        installed = folder / "plug_ins" / "plug_ins-1.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-ins\nVersion: 1\n")
        (installed / "entry_points.txt").write_text(PLUG_INS)
        (installed.parent / "on_any_machine.py").write_text(ON_ANY_MACHINE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.traces, self.log = folder / "traces", folder / "log"
        search = [str(installed.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {"WORKBENCH_TRACE_DIR": str(self.traces), "PYTHONPATH": os.pathsep.join(filter(None, search))}
        more |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_PLUGINS": "workbench,anywhere"}
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *OPTIONS.split()],
                env={**os.environ, **more},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not start: {self.log.read_text()[-3000:]}")

    def post(self, path, **body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def generate(self, name, token_ids, max_tokens):
        options = {"max_new_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return json.loads(self.post("/generate", rid=name, input_ids=token_ids, sampling_params=options))["meta_info"]


def test_a_server_is_recorded_as_it_answers(tmp_path):
    server = Server(tmp_path)
    try:
        server.wait()
        prompt = [3 + i % 90 for i in range(100)]
        answers = {"first": server.generate("first", prompt, 5)}
        with ThreadPoolExecutor(4) as pool:
            coming = {f"r{i}": pool.submit(server.generate, f"r{i}", prompt + [200 + i] * 9, 12) for i in range(3)}
            gone = pool.submit(server.generate, "gone", prompt[::-1], 1500)
            answers |= {name: answer.result() for name, answer in coming.items()}
            server.post("/abort_request", rid="gone")
            answers["gone"] = gone.result()
        server.process.terminate()
        server.process.wait(60)
    finally:
        server.process.kill()
    (path,) = server.traces.iterdir()
    trace = Trace.load(path)
    assert trace.end == "" and not trace.problems and trace.has_ended
    assert trace.config["async_scheduling"] is True
    said = {name: (answer["cached_tokens"], answer["finish_reason"]["type"]) for name, answer in answers.items()}
    hits = {c.request_id: c.num_cached_tokens for step in reversed(list(trace)) for c in step.chunks}
    reasons = {name: reason for step in trace for name, reason in step.finish_reasons.items()}
    assert {name: (hits[name], reasons[name]) for name in answers} == said
    assert said["r1"] == (100, "length") and said["gone"][1] == "abort"
    for name, answer in answers.items():
        sampled = sum(c.sampled is not None for step in trace for c in step.chunks if c.request_id == name)
        assert sampled == answer["completion_tokens"] - (name == "gone")  # the one of its abort is thrown away
        assert trace.requests[name].num_prompt_tokens == answer["prompt_tokens"]

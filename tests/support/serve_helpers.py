"""Servers for tests: a separate process, or a thread of this process whose engine a test can inspect."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from word_llama import WordTokenizer, make_tiny_llama

ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, "num_blocks": 128, "max_model_len": 256}
ROLES = {"system": 101, "user": 102, "assistant": 103}


class ChatTokenizer(WordTokenizer):
    """A word for the role of each message, and the assistant's at the end."""

    has_chat_template = True

    def apply_chat_template(self, messages, add_generation_prompt=True, **kw):
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("the template wants a user's message")
        text = "".join(f" w{ROLES[message['role']]} {message['content']}" for message in messages)
        return text + " w103" * add_generation_prompt


def make_chat_model():
    """The tiny random llama with a chat template."""
    return replace(make_tiny_llama(), tokenizer=ChatTokenizer())


class Client:
    """Requests to a port of this machine."""

    def __init__(self, port):
        self.port = port

    def openai(self, **options):
        import openai

        options = {"api_key": "none", "max_retries": 0, "timeout": 120} | options
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options)

    def ask(self, method, path, body=None, headers=None):
        """Status, headers and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        answer = response.status, response.headers, response.read().decode()
        connection.close()
        return answer

    def metric(self, name):
        text = self.ask("GET", "/metrics")[2]
        return float(re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)", text, re.M)[1])


class ServerProcess(Client):
    """A server process; by default over the tiny random llama, with the options of serve_process.py."""

    def __init__(self, *command, environment=None, **options):
        command = command or (sys.executable, str(Path(__file__).with_name("serve_process.py")), json.dumps(options))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Nothing is broken in the process that the checks of a model are there for.
            env={**(environment or os.environ), "WORKBENCH_PREFLIGHT": "remembered"},
        )
        self.address = self.process.stdout.readline()
        super().__init__(int(re.search(r":(\d+) ", self.address)[1]))

    def end(self):
        """Ask the process to end, and return its last output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        self._errors.seek(0)
        self.errors = self._errors.read()
        self._errors.close()
        return out


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(engine, **settings):
    """Serve an engine on a thread of this process; yields a Client with ``server``, ``engine`` and ``loop``."""
    from workbench.apps.serve.fair_loop import FairEventLoop
    from workbench.apps.serve.server import Server
    from workbench.apps.serve.settings import ServeSettings

    ready = threading.Event()
    client = Client(0)

    async def main():
        client.server = Server(engine, ServeSettings(port=0, **settings))
        client.engine, client.loop, client.port = engine, asyncio.get_running_loop(), client.server.port
        ready.set()
        await client.server.run()

    def run():
        with asyncio.Runner(loop_factory=FairEventLoop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    assert ready.wait(60)
    try:
        yield client
    finally:
        client.loop.call_soon_threadsafe(client.server.stop)
        thread.join(60)

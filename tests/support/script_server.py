"""A server of scripts that a person would start, such as ``panel serve``, in a process that ends with the test."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
START_SECONDS = 120


@contextmanager
def serving(module, arguments, folder, page="", **environment):
    """The address of a server, as soon as it answers.

    Args:
        module: The module that is run in ``folder``, which finds the tests' support.
        arguments: Its arguments; PORT stands for a free port.
        folder: The folder of the scripts; it gets the server's ``log``.
        page: The page that is asked for until it is there.
        environment: Further variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = f"http://127.0.0.1:{port}/"
    paths = [str(ROOT / "tests" / "support"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *(port if word == "PORT" else word for word in arguments)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=variables)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                try:
                    urlopen(address + page, timeout=30).read()
                    break
                except URLError:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

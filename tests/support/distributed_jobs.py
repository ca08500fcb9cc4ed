"""Jobs of several ranks on this machine, for the tests: real processes, MLX's ring on 127.0.0.1."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).parent
EPHEMERAL = 32768  # Linux gives outgoing connections ports from here on; ports below stay free once found


def free_ports(count):
    """The first of ``count`` free ports in a row."""
    while True:
        first = random.SystemRandom().randrange(20_000, EPHEMERAL - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class Job:
    """The ranks of one job; leaving the context kills those that still run."""

    def __init__(self, folder, program, *arguments, size, variables=()):
        first = free_ports(size)
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(size)]))
        self._outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(size)]
        self.processes = []
        for rank, output in enumerate(self._outputs):
            with output.open("wb") as stream:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, SUPPORT / program, *map(str, arguments)],
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), **dict(variables)},
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def output(self, rank):
        return self._outputs[rank].read_text()

    def wait_for(self, rank, text, seconds=120):
        """Wait until a rank has printed something."""
        deadline = time.monotonic() + seconds
        while text not in self.output(rank):
            assert self.processes[rank].poll() is None, f"rank {rank} ended:\n{self.output(rank)}"
            assert time.monotonic() < deadline, f"rank {rank} did not print {text!r}:\n{self.output(rank)}"
            time.sleep(0.05)

    def wait(self, *ranks, seconds=120):
        """Exit statuses of the ranks, all of them by default."""
        deadline = time.monotonic() + seconds
        for rank in ranks or range(len(self.processes)):
            try:
                self.processes[rank].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} has not ended:\n{self.output(rank)}") from None
        return [process.returncode for process in self.processes]

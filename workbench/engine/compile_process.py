"""The process that compiles what an engine needs: run as a program by `workbench.engine.compiling`.

It loads the model as the engine would, on a small pool. So every function is compiled and kept, and every check of the
compiled code is made and remembered. Its priority is low, and it ends with the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from workbench.config import EngineConfig
from workbench.kernels.cpu.attention import object_code

NICENESS = 5
NUM_BLOCKS = 16


def main(descriptor: int) -> None:
    """Compile for the model that the first message names, and tell how far it is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    connection = Connection(descriptor)
    asked = json.loads(connection.recv_bytes())
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()

    def tell(**message: object) -> None:
        connection.send_bytes(json.dumps(message).encode())

    object_code.listeners.append(lambda name, kept: tell(function=name.lstrip("_"), kept=kept))
    try:
        tell(state="compiling")
        _compile(asked["model"], asked["options"], EngineConfig.from_dict(asked["config"]))
        tell(state="done")
    except Exception as problem:
        tell(state="failed", reason=f"{type(problem).__name__}: {problem}")


def _compile(model: str, options: dict[str, str], config: EngineConfig) -> None:
    """Load a model and make its runner."""
    from workbench.engine.model_runner import ModelRunner
    from workbench.kernels.cpu.weight_sums import keep_sum_weights
    from workbench.models.load import load_model

    keep_sum_weights()
    loaded = load_model(model, device="cpu", **options)  # type: ignore[arg-type]
    ModelRunner(loaded, config.replace(num_blocks=NUM_BLOCKS), one_table=False).close()


def _end_with(connection: Connection) -> None:
    """End this process when the engine's end of the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

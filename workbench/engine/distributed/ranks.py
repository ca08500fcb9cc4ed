"""One model over several ranks: the runner of rank 0, and the loop of the other ranks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from workbench.config import EngineConfig
from workbench.engine.distributed.link import Kind, Link
from workbench.engine.distributed.wire import decode, encode
from workbench.engine.forward.path import ForwardOutput
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch
from workbench.models.load import LoadedModel

READY_SECONDS = 600
"""Time from rank 0's request for runners to the last answer, which includes the rest of that rank's loading."""


class SharedRunner(ModelRunner):
    """A runner whose forward passes other ranks take part in: a pass that fails ends the job.

    The others are in the same pass, and a rank that waits in a collective cannot be called back.

    Args:
        model: This rank's model, or its part of a model.
        config: Configuration of the engine.
        link: Link to the other ranks.
        **options: See `ModelRunner`.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, link: Link, **options: Any) -> None:
        self._link = link
        self._num_passes = 0
        super().__init__(model, config, **options)

    def forward(self, packed: PackedBatch) -> ForwardOutput:
        """Run the model once, see `ModelRunner.forward`; does not return when a rank is lost."""
        self._link.doing = f"in forward pass {self._num_passes}"
        try:
            made = super().forward(packed)
        except BaseException as problem:  # also KeyboardInterrupt, which abandons the pass
            self._link.fail(f"{type(problem).__name__}: {problem}")
        self._link.doing = f"after forward pass {self._num_passes}"
        self._num_passes += 1
        return made


class LeadingRunner(SharedRunner):
    """The runner of rank 0, which makes the other ranks run the same passes.

    Each rank's preflight finds how its part of the model is served. All of them run at the same time, because a sharded
    model runs on all ranks or not at all.

    Args:
        model: This rank's part of the model.
        config: Configuration of the engine, from which the other ranks make their pools too.
        link: Link to the other ranks, each of which runs `follow`.

    Raises:
        ValueError: The ranks hold different models, or serve them differently.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, link: Link) -> None:
        link.doing = "making the runners"
        link.broadcast(Kind.OPEN, json.dumps(config.to_dict()).encode())
        # Ranks whose preflights differ run different passes, and then wait for each other without end.
        late = f"the ranks serve the model differently, or one takes more than {READY_SECONDS} s to load it"
        too_late = threading.Timer(READY_SECONDS, link.fail, [late])
        too_late.daemon = True
        too_late.start()
        try:
            super().__init__(model, config, link)
            self._check_that_ranks_agree(model)
        except Exception:
            link.broadcast(Kind.CLOSE)
            raise
        finally:
            too_late.cancel()

    def _check_that_ranks_agree(self, model: LoadedModel) -> None:
        own = _facts(model, self)
        for _ in range(self._link.size - 1):
            message = self._link.receive()
            theirs = json.loads(message.payload)
            for name, value in own.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"ranks disagree on {name}: {value!r} on rank 0, {theirs.get(name)!r} on rank {message.rank}; "
                        "start every rank with the same model, packages and options"
                    )

    def forward(self, packed: PackedBatch) -> ForwardOutput:
        """Run the model once on every rank, see `ModelRunner.forward`; does not return when a rank is lost."""
        self._check(packed)
        self._link.broadcast(Kind.STEP, encode(packed))
        return super().forward(packed)

    def close(self) -> None:
        """Leave the model as it was before, on every rank."""
        super().close()
        self._link.broadcast(Kind.CLOSE)

    def describe(self) -> dict[str, Any]:
        """Facts about the model on this rank, and the number of ranks as ``tensor_parallel_size``."""
        return {**super().describe(), "tensor_parallel_size": self._link.size}


def follow(link: Link, load: Callable[[], LoadedModel]) -> None:
    """Run the passes of rank 0 until the job is done; a failure on this rank ends the job, and does not return.

    Args:
        link: Link to rank 0.
        load: Loads this rank's part of the model.
    """
    try:
        model = load()
        runner: ModelRunner | None = None
        while (message := link.receive()).kind is not Kind.STOP:
            if message.kind is Kind.OPEN:
                runner = ModelRunner(model, EngineConfig.from_dict(json.loads(message.payload)))
                link.send(0, Kind.READY, json.dumps(_facts(model, runner)).encode())
            elif runner is None:
                raise ValueError(f"rank 0 sent {message.kind.name} before OPEN")
            elif message.kind is Kind.STEP:
                runner.forward(decode(message.payload, runner.kv_cache.num_blocks))
            elif message.kind is Kind.CLOSE:
                runner.close()
    except Exception as problem:
        link.fail(f"{type(problem).__name__}: {problem}")


def _facts(model: LoadedModel, runner: ModelRunner) -> dict[str, Any]:
    """Facts that have to be equal on all ranks, so that their forward passes are parts of one."""
    return {
        "model": [model.name, model.architecture, model.num_parameters, model.dtype, model.quantized],
        "weights that every rank holds": _fingerprint(model),
        "attention": [runner.mode, runner.preflight.num_heads, runner.preflight.final_norm],
        "KV heads": [layer.num_kv_heads for layer in runner.preflight.layers],
        "num_blocks": runner.kv_cache.num_blocks,
        "versions": {package: version(package) for package in ("inference-workbench", "mlx", "mlx-lm")},
    }


def _fingerprint(model: LoadedModel) -> str:
    """A digest of the norms, small weights that are not split."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(dict(tree_flatten(model.model.parameters())).items()):
        if weight.ndim == 1 and "norm" in name:
            digest.update(name.encode() + np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()

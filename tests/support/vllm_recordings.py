"""Recordings of the vLLM double: a scheduler to drive, and its messages or files read back."""

import logging
from pathlib import Path

import vllm_double
from msgspec.structs import replace
from vllm_double import AsyncVllmSchedulerDouble, VllmSchedulerDouble, vllm_config

from workbench.simulation.workload import read_workload
from workbench.trace import StepRecord, Supplement, Trace, TraceMeta
from workbench.trace.recorders import vllm as integration
from workbench.trace.recorders.assembler import Assembler
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.messages import unpack

DATA = Path(__file__).parents[1] / "data"
WORKLOADS = sorted((DATA / "vllm" / "workloads").glob("*.json"))
KEY = b"the key of a test"
LONG = DATA / "vllm" / "workloads" / "d_preempt.json"

RecordingClass, AsyncRecordingClass = integration.recording_classes(VllmSchedulerDouble, AsyncVllmSchedulerDouble)


def RecordingDouble(config) -> VllmSchedulerDouble:
    return RecordingClass(vllm_config(config))


class InProcessWriter:
    """Stands for the writer's process and keeps the bytes."""

    def __init__(self) -> None:
        self.received = bytearray()

    def send(self, data: bytes) -> None:
        self.received += data

    def close(self, *, wait: bool = True) -> None:
        pass


def assemble(received: bytearray) -> Trace:
    """The trace that the writer's process would write from these messages."""
    trace = assembler = None
    for message in unpack(received):
        if assembler is None:
            meta = TraceMeta(source=message.source, config=message.config)
            hasher = BlockHasher(KEY, meta) if message.settings.hashes else None
            trace = Trace(replace(meta, prefix_hashes=hasher.described) if hasher else meta)
            settings = message.settings
            assembler = Assembler(
                message.config,
                as_vllm=not meta.is_of_sglang,
                max_waiting=settings.max_waiting,
                start=message.start,
                watches_pool=message.watches_pool,
                hasher=hasher,
            )
            continue
        for line in assembler.take(message):
            if isinstance(line, Supplement):
                trace.add_supplement(line)
            else:
                trace.append(line) if isinstance(line, StepRecord) else trace.add_request(line)
    return trace


def run_double(workload: Path, **changes) -> VllmSchedulerDouble:
    config, arrivals = read_workload(workload)
    scheduler = RecordingDouble(config.replace(**changes))
    vllm_double.drive(scheduler, arrivals)
    return scheduler


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

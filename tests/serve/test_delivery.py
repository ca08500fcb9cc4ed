"""Tokens of a step reach their streams in pieces, so that the event loop can serve others in between."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from workbench.apps.serve import bridge as bridge_module
from workbench.apps.serve.bridge import EngineBridge
from workbench.apps.serve.settings import ServeSettings
from workbench.apps.serve.stream import Delta, Stream
from workbench.config import EngineConfig, SamplingParams


def test_a_backlog_is_delivered_in_order_and_faster_the_longer_it_is(monkeypatch):
    metrics = SimpleNamespace(add_step=lambda record, arrivals: None)
    monkeypatch.setattr(bridge_module, "ServerMetrics", lambda engine: metrics)
    num_delivered = []

    async def deliver():
        engine = SimpleNamespace(on_step=lambda listener: None, config=EngineConfig(), trace=None)
        bridge = EngineBridge(engine, ServeSettings(port=0), asyncio.get_running_loop())
        stream = Stream("r0", SamplingParams())
        for step in range(10):
            bridge._deliver(None, [], [(stream, Delta((step * 64 + i,))) for i in range(64)])
        while sum(num_delivered) < 640 and len(num_delivered) < 200:
            await asyncio.sleep(0)
            num_delivered.append(stream.deltas.qsize() - sum(num_delivered))
        bridge.preparation.close()
        return [stream.deltas.get_nowait().token_ids[0] for _ in range(stream.deltas.qsize())]

    with ThreadPoolExecutor(1) as thread:  # a test of a page may have left its event loop in this one
        assert thread.submit(asyncio.run, deliver()).result() == list(range(640))
    assert 16 < max(num_delivered) <= 20, "a part of 32 of what waits"
    assert len(num_delivered) < 120 and num_delivered[-1] <= 2

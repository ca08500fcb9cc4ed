"""The measurements of a run's requests: by the client, and in the recordings of the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench import Trace
from workbench.simulation.arrivals import Arrival, timed_arrival


class Measured:
    """Recordings of all servers, and each run by its name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        folders = sorted((root / "servers").glob("s?"))
        self.traces = [Trace.load(next(folder.glob("*.jsonl*"))) for folder in folders]
        self.urls: list[str] = json.loads((root / "urls.json").read_text())
        self.server_of: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.inside: dict[str, dict[str, float]] = {}  # when vLLM had a request, sampled its first token, ended it
        for index, trace in enumerate(self.traces):
            names = {name: name.removeprefix("cmpl-").rsplit("-", 2)[0] for name in trace.requests}
            self.server_of |= dict.fromkeys(names.values(), index)
            zero = trace.meta.created
            for request_id, name in names.items():
                self.inside[name] = {"sent": zero + trace.requests[request_id].arrival_time}
            end = 0.0
            for step in trace:
                for request_id in step.admitted:
                    arrived = trace.requests[request_id].arrival_time
                    if arrived > end:
                        self.inside[names[request_id]]["to_scheduler"] = step.time - arrived
                end = step.end
                for chunk in step.chunks:
                    name = names[chunk.request_id]
                    if chunk.num_cached_tokens and name not in self.cached:
                        self.cached[name] = chunk.num_cached_tokens
                    if not chunk.is_partial_prefill:
                        self.inside[name].setdefault("first", zero + step.end)
                        self.inside[name]["end"] = zero + step.end

    def outside(self, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
        """Seconds of each request that are neither in a queue nor in a step.

        To vLLM: the client, HTTP and the router. To the client: detokenizing, and the same way back. To the scheduler,
        of requests that found no step in flight: from vLLM's server process to its engine process.
        """
        pairs = [(row, self.inside[row["id"]]) for row in rows]
        return {
            "to_vllm": [inside["sent"] - row["sent"] for row, inside in pairs],
            "to_scheduler": [inside["to_scheduler"] for _, inside in pairs if "to_scheduler" in inside],
            "to_client": [row["first"] - inside["first"] for row, inside in pairs],
        }

    def run(self, name: str, seen_by: str = "client") -> tuple[list[int], list[Arrival], list[dict[str, Any]]]:
        """The router's order of the servers, the requests by the time they were sent, and the client's or vLLM's times.

        Rows get the place of their server in the router's order as ``replica``.
        """
        order = json.loads((self.root / f"{name}.order.json").read_text())
        given = {row["id"]: row for row in json.loads((self.root / f"{name}.workload.json").read_text())}
        rows = json.loads((self.root / f"{name}.client.json").read_text())
        if seen_by == "vllm":
            rows = sorted((row | self.inside[row["id"]] for row in rows), key=lambda row: row["sent"])
        requests = []
        for row in rows:
            asked = given[row["id"]]
            row["replica"] = order.index(self.server_of[row["id"]])
            at = row["sent"] - rows[0]["sent"]
            part = (row["id"], asked["prompt"], asked["max_tokens"], at)
            requests.append(timed_arrival(*part, session=asked["session"]))
        return order, requests, rows

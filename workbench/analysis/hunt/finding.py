"""A finding, and the folder in which somebody can act on it."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from workbench.analysis.hunt.records import record_run
from workbench.analysis.hunt.search import Found
from workbench.analysis.hunt.target import Fault, Target
from workbench.analysis.hunt.test_file import test_text
from workbench.base.on_demand import find
from workbench.base.outside_files import read_json, read_text
from workbench.base.text import counted
from workbench.trace import Trace
from workbench.trace.laws import LAWS

LAST_STEPS = 12
"""Number of steps that a report tells."""


@dataclass(frozen=True)
class Finding:
    """A distinct fault; the fields of ``finding.json``.

    Attributes:
        law: The broken law.
        message: The fault, with the numbers.
        place: The rule that is broken, or the line that failed.
        scheduler: The scheduler under test.
        version: Its version.
        config: The configuration of the smallest case.
        num_requests: Requests of the smallest case.
        num_workloads: Workloads until it was first seen.
        seconds: Seconds until then.
        num_seen: Workloads in which it was seen.
        step: The step that breaks the law.
        request_id: The request concerned.
        smallest_change: The smallest change that lets the run end, if nothing moves.
        policy: The policy of Workbench's scheduler, "" for vLLM's rules.
        folder: The name of its folder, "" if it has none.
    """

    law: str
    message: str
    place: str
    scheduler: str
    version: str
    config: dict[str, Any]
    num_requests: int
    num_workloads: int
    seconds: float
    num_seen: int
    step: int
    request_id: str
    smallest_change: str
    policy: str
    folder: str = ""

    @property
    def protects(self) -> str:
        """The purpose of the law."""
        return next(law.protects for law in LAWS if law.name == self.law)

    @property
    def title(self) -> str:
        """The event and its step, for a heading."""
        return f"Step {self.step} " + ("crashed" if self.law == "crash" else f"breaks the law of {self.law}")

    @property
    def under_test(self) -> str:
        """The policy, if there is one, and the scheduler with its version."""
        scheduler = f"{self.scheduler} {self.version}".strip()
        return f"{self.policy} in {scheduler}" if self.policy else scheduler

    @property
    def name(self) -> str:
        """The name of its folder, without the number."""
        words = re.sub(r"[^a-z0-9]+", "-", self.place.lower()).strip("-")
        return f"{self.law}-{words}"[:60].strip("-")

    def _repr_html_(self) -> str:
        found = f"{self.under_test}, step {self.step}, after {counted(self.num_workloads, 'workload')}"
        return f"<p><b>{escape(self.law)}</b>: {escape(self.message)}<br>{escape(self.protects)}<br>{escape(found)}</p>"


def finding_of(target: Target, found: Found, smallest_change: str) -> Finding:
    """A fault of a search as a finding."""
    fault: Fault = found.fault
    return Finding(
        fault.law,
        fault.message,
        fault.place,
        target.name,
        target.version,
        found.workload["config"],
        len(found.workload["requests"]),
        found.num_workloads,
        found.seconds,
        found.num_seen,
        fault.step,
        fault.request_id,
        smallest_change,
        target.policy,
    )


def write_folder(out: Path, target: Target, finding: Finding, workload: dict[str, Any]) -> Finding:
    """Write the folder of a finding, replacing one with the same case.

    Returns:
        The finding with the name of its folder.
    """
    text = workload_text(workload)
    folder, number = out / finding.name, 2
    while folder.exists() and not _has(folder, finding.scheduler, text):
        folder, number = out / f"{finding.name}-{number}", number + 1
    folder.mkdir(parents=True, exist_ok=True)
    finding = replace(finding, folder=folder.name)
    (folder / "finding.json").write_text(json.dumps(asdict(finding), indent=1) + "\n", encoding="utf-8")
    (folder / "workload.json").write_text(text, encoding="utf-8")
    trace = record_run(target, workload)
    trace.save(folder / "trace.jsonl.gz")
    facts = {"law": finding.law, "message": finding.message, "protects": finding.protects}
    (folder / "test_finding.py").write_text(test_text(target, facts, text), encoding="utf-8")
    (folder / "report.md").write_text(report(trace, finding, workload), encoding="utf-8")
    try:
        page = find("Finding.page")(trace, finding)
    except Exception as problem:  # pictures are made for runs that hold together
        page = f"<p>The run cannot be drawn: {html.escape(repr(problem))}. Its steps are in trace.jsonl.gz.</p>\n"
    (folder / "page.html").write_text(page, encoding="utf-8")
    return finding


def _has(folder: Path, scheduler: str, text: str) -> bool:
    """Whether a folder has this case of this scheduler, or nothing that can be read."""
    try:
        earlier = read_json(folder / "finding.json")
        return bool(earlier["scheduler"] == scheduler and read_text(folder / "workload.json") == text)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _needs(finding: Finding) -> str:
    """The code that the test of a finding imports."""
    named = finding.policy or (finding.scheduler if ":" in finding.scheduler else "")
    module = named.removeprefix("vllm:").partition(":")[0]
    return f"the module {module} in the folder where you start it" if module else "the scheduler"


def workload_text(workload: dict[str, Any]) -> str:
    """A workload as JSON with a line for the configuration and one for each request."""
    requests = ",\n  ".join(json.dumps(request) for request in workload["requests"])
    return f'{{"config": {json.dumps(workload["config"])},\n "requests": [\n  {requests}]}}\n'


def report(trace: Trace, finding: Finding, workload: dict[str, Any]) -> str:
    """The text of an issue, ready to be filed."""
    from workbench.trace.readings.narrate import narrate

    scheduler = finding.under_test
    steps = "\n".join(f"- {narrate(record, trace.requests)}" for record in list(trace)[-LAST_STEPS:])
    lines = [
        f"# {scheduler}: {finding.message}",
        "",
        f"**Version**: {scheduler}",
        f"**Place**: {finding.place}",
        f"**Expected**: {finding.protects}",
        f"**Observed**: step {finding.step}: {finding.message}. {finding.smallest_change}".rstrip(),
        "",
        "## The smallest case",
        "",
        f"{counted(finding.num_requests, 'request')}, found after {counted(finding.num_workloads, 'random workload')} "
        f"({finding.seconds} s), seen in {counted(finding.num_seen, 'workload')} of the hunt.",
        "",
        "```json",
        workload_text(workload).strip(),
        "```",
        "",
        f"`python -m pytest test_finding.py` shows it; it needs {_needs(finding)} and pytest, no model and no GPU.",
        "",
        "## The last steps",
        "",
        steps,
        "",
    ]
    return "\n".join(lines)

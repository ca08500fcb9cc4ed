"""One of two schedulers that are compared, in a separate process and perhaps in another environment.

Started by `workbench.analysis.hunt.between.sides` as a file; it answers a JSON line with a JSON line:

    {"choices": ["00ff..", ...], "features": [...], "without": [...]}   a digest of the schedule of each workload
    {"workload": {...}}                                                 its schedule
    {"workload": {...}, "cache": true}                                  and what the prefix cache contains
    {"workload": {...}, "follow": true}                                 and the lines that ran, step by step
    {"workload": {...}, "grafts": [...]}                                its schedule with other texts of functions
    {"record": {...}, "path": "a.jsonl.gz"}                             writes the trace of a workload

Nothing of Workbench is imported before its package has been put in place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Redirect(MetaPathFinder):
    """Imports modules from other files: {module: path of its file, or of the folder of a package}."""

    def __init__(self, places: dict[str, str]) -> None:
        self.places = places

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other file of a module."""
        place = self.places.get(fullname)
        if place is None:
            return None
        if Path(place).is_dir():
            return importlib.util.spec_from_file_location(
                fullname, Path(place, "__init__.py"), submodule_search_locations=[place]
            )
        return importlib.util.spec_from_file_location(fullname, place)


def put_workbench_in_place(package: str) -> None:
    """Import Workbench from a folder, whatever the environment has, and nothing else from beside it."""
    place = Path(package)
    spec = importlib.util.spec_from_file_location(
        "workbench", place / "__init__.py", submodule_search_locations=[package]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workbench"] = module
    spec.loader.exec_module(module)


class Side:
    """Answers for one scheduler."""

    def __init__(self, given: dict[str, Any]) -> None:
        from workbench.analysis.hunt.between.ran import Places
        from workbench.analysis.hunt.target import find_target

        self.target = find_target(given["scheduler"], as_part=given["as_vllm"])
        folders = [str(Path(folder).parent) for folder in self.target.folders if Path(folder).name == "v1"]
        self.places = Places(folders or self.target.folders, given["places"])
        self.dropped: set[str] = set()

    def hello(self) -> dict[str, Any]:
        """Facts about the scheduler."""
        return {
            "version": self.target.version,
            "features": list(self.target.features),
            "roots": self.places.roots,
            "hooks": self._hooks(),
        }

    def _hooks(self) -> list[str]:
        """The methods of vLLM's classes that the class under test overrides."""
        if not self.target.name.startswith("vllm:"):
            return []
        module, _, name = self.target.name.removeprefix("vllm:").partition(":")
        kinds = getattr(sys.modules[module], name).__mro__
        ours = [kind for kind in kinds if kind.__module__.partition(".")[0] != "vllm"]
        theirs = [kind for kind in kinds if kind not in ours]
        names = {key for kind in ours for key, value in vars(kind).items() if callable(value)}
        return sorted(f"{kind.__name__}.{key}" for kind in theirs for key in names if key in vars(kind))

    def answer(self, asked: dict[str, Any]) -> Any:
        """Answer a line."""
        from workbench.analysis.hunt.between.graft import grafted
        from workbench.analysis.hunt.records import record_run

        if "choices" in asked:
            with grafted(self.places, asked.get("grafts", ())):
                return [self._digest(self._made(choices, asked), asked) for choices in asked["choices"]]
        if "workload" in asked:
            return self._schedule(asked)
        try:
            record_run(self.target, asked["record"], ["crash"]).save(asked["path"])
        except Exception as problem:  # it cannot be made at all
            return {"problem": str(problem)}
        return {}

    def _made(self, choices: str, asked: dict[str, Any]) -> dict[str, Any]:
        from workbench.analysis.hunt.workloads import make_workload

        workload = make_workload(bytes.fromhex(choices), asked["features"])
        for name in asked["without"]:
            workload["config"].pop(name, None)
        return workload

    def _digest(self, workload: dict[str, Any], asked: dict[str, Any]) -> str:
        steps, end = self._run(workload, self._kept(asked))
        return hashlib.blake2b(json.dumps([steps, end.partition(":")[0]]).encode(), digest_size=8).hexdigest()

    def _schedule(self, asked: dict[str, Any]) -> dict[str, Any]:
        from workbench.analysis.hunt.between.graft import NotGrafted, grafted

        kept = self._kept(asked)
        try:
            with grafted(self.places, asked.get("grafts", ())):
                steps, end = self._run(asked["workload"], kept)
        except NotGrafted as problem:
            return {"problem": str(problem)}
        told = {"steps": steps, "end": end, "dropped": sorted(self.dropped)}
        return {**told, "ran": kept.ran()} if asked.get("follow") else told

    def _kept(self, asked: dict[str, Any]) -> Any:
        from workbench.analysis.hunt.between.ran import Followed
        from workbench.analysis.hunt.schedule import Kept

        cache = bool(asked.get("cache"))
        return Followed(self.places, cache=cache) if asked.get("follow") else Kept(cache=cache)

    def _run(self, workload: dict[str, Any], kept: Any) -> tuple[list[Any], str]:
        from workbench.analysis.hunt.schedule import schedule_of

        return schedule_of(self.target, workload, kept, self.dropped)


def main() -> None:
    """Answer until the input ends."""
    given = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a scheduler prints is not an answer
    logging.disable(logging.WARNING)  # vLLM remarks on unusual limits, of which workloads are made
    sys.path.extend(given["behind"])
    sys.meta_path.insert(0, Redirect(given["redirect"]))
    put_workbench_in_place(given["package"])
    try:
        side = Side(given)
        print(json.dumps(side.hello()), file=answers, flush=True)
    except Exception as problem:
        print(json.dumps({"problem": f"{type(problem).__name__}: {problem}"}), file=answers, flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(side.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

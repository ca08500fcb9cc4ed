"""Builds the notebooks that need no model as pages: JupyterLite, which runs them in the browser with Pyodide.

    python scripts/build_lite.py [TARGET]

The installation needs a network: JupyterLite goes into ``.venv-lite`` and its wheels for Pyodide into
``.venv-lite/wheels``, both from PyPI. The pages need none: they hold Pyodide and every wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import workbench
from workbench.apps.playground import runtime
from workbench.apps.playground.bytecode import compiled
from workbench.apps.playground.site import STANDARD_LIBRARY

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "scripts" / "lite_requirements.txt"
ENVIRONMENT = ROOT / ".venv-lite"
WHEELS = ENVIRONMENT / "wheels"
NOTEBOOKS = ("06_partial_prefills", "11_own_policy", "12_recordings", "17_hunt")
DATA = ("data/vllm_five_long.jsonl.gz",)

IN_THE_PAGE = ("micropip", "ipython", "jedi", "comm", "anywidget", "param", "hypothesis")
"""Packages that the kernel, the views and the hunt import in the page. All are of pure Python, with their dependencies,
but Hypothesis, which has a wheel for Pyodide."""

LEFT_OUT = ("pexpect", "ptyprocess", "widgetsnbextension")
"""Dependencies that are never imported there; the last is 2 MB of JavaScript for another front end."""

SITE_PACKAGES = "/lib/python3.14/site-packages"
HOME = "workbench_course"
"""Folder of the page's Python in which the kernel starts: it holds the data of the notebooks."""

DRIVE = "@jupyterlite/application-extension:service-worker-manager"
"""The plugin that shows the page's files to the kernel. It is off: with it, every import asks the page first."""

NEEDS_A_MODEL = (
    "*This part runs a model, which a web page cannot load: open the notebook in Jupyter, after "
    "`workbench notebooks my-course`.*"
)


def is_installed() -> bool:
    """Whether JupyterLite, its wheels and Pyodide are here."""
    return (ENVIRONMENT / ".installed").is_file() and runtime.is_fetched()


def install() -> None:
    """Install JupyterLite into its environment, unless it is there.

    Raises:
        subprocess.CalledProcessError: There is no network, or a package cannot be had.
    """
    if (ENVIRONMENT / ".installed").is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", str(REQUIREMENTS)], check=True)
    tag = ["--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--abi", "cp314", "--abi", "none"]
    subprocess.run([*pip, "download", *tag, "--only-binary=:all:", "--dest", str(WHEELS), *IN_THE_PAGE], check=True)
    (ENVIRONMENT / ".installed").touch()


def package_wheel(folder: Path) -> Path:
    """The package as a wheel without dependencies, and the data of the notebooks.

    The page has the dependencies that it needs, and cannot have the others.
    """
    name = f"inference_workbench-{workbench.__version__}"
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((ROOT / "workbench").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT))
        for data in DATA:
            archive.write(ROOT / "notebooks" / data, f"{HOME}/{data}")
        metadata = f"Metadata-Version: 2.1\nName: inference-workbench\nVersion: {workbench.__version__}\n"
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return wheel


def locked(wheel: Path) -> dict[str, Any]:
    """A wheel as Pyodide's lock file describes it; all of them are loaded, so none names what it depends on."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as files:
        tops = {entry.partition("/")[0].partition(".")[0] for entry in files.namelist()}
    return {
        "name": name.lower().replace("_", "-"),
        "version": version,
        "file_name": wheel.name,
        "install_dir": "site",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "package_type": "package",
        "imports": sorted(top for top in tops if top.isidentifier()),
        "depends": [],
        "unvendored_tests": False,
    }


def put_pyodide(folder: Path, kernel_wheels: list[Path]) -> list[str]:
    """Put Pyodide into a folder, with a lock file that knows the wheels of the page; returns their names."""
    folder.mkdir(parents=True)
    source = runtime.runtime_folder()
    for name in runtime.FILES:
        shutil.copyfile(source / name, folder / name)
    library = folder / STANDARD_LIBRARY
    library.write_bytes(compiled(library.read_bytes(), "/lib/python314.zip", source))
    downloaded = [wheel for wheel in WHEELS.glob("*.whl") if wheel.name.partition("-")[0] not in LEFT_OUT]
    for wheel in sorted([*downloaded, *kernel_wheels, source / runtime.MSGSPEC_WHEEL]):
        shutil.copyfile(wheel, folder / wheel.name)
    package_wheel(folder)
    lock = json.loads((folder / "pyodide-lock.json").read_text())
    packages = [locked(wheel) for wheel in sorted(folder.glob("*.whl"))]
    lock["packages"] = {package["name"]: package for package in packages}
    (folder / "pyodide-lock.json").write_text(json.dumps(lock))
    return [package["name"] for package in packages]


def in_the_page(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook without the cells that need a model, which are tagged "model"."""
    cells = []
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "model" not in tags:
            cells.append(cell)
        elif "check" not in tags:
            cells.append({"cell_type": "markdown", "id": cell["id"], "metadata": {}, "source": NEEDS_A_MODEL})
    kernel = {"name": "python", "display_name": "Python (Pyodide)", "language": "python"}
    return {**notebook, "cells": cells, "metadata": {**notebook["metadata"], "kernelspec": kernel}}


def build(target: Path) -> None:
    """Write JupyterLite with the notebooks into a folder.

    Raises:
        OSError: JupyterLite or Pyodide is missing.
    """
    if not is_installed():
        raise OSError("they need JupyterLite and Pyodide: `make docs` installs both where it has a network")
    extension = ENVIRONMENT / "share/jupyter/labextensions/@jupyterlite/pyodide-kernel-extension/static/pypi"
    kernel_wheels = [next(extension.glob(f"{name}-*.whl")) for name in ("pyodide_kernel", "piplite", "ipykernel")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = put_pyodide(folder / "static" / "pyodide", kernel_wheels)
        (folder / "files").mkdir()
        for notebook in NOTEBOOKS:
            content = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())
            (folder / "files" / f"{notebook}.ipynb").write_text(json.dumps(in_the_page(content)))
        options = {"packages": packages, "env": {"HOME": f"{SITE_PACKAGES}/{HOME}"}}
        settings = {"loadPyodideOptions": options, "disablePyPIFallback": True}
        configuration = {
            "appName": "Workbench",
            "disabledExtensions": [DRIVE],
            "litePluginSettings": {"@jupyterlite/pyodide-kernel-extension:kernel": settings},
        }
        described = {"jupyter-lite-schema-version": 0, "jupyter-config-data": configuration}
        (folder / "jupyter-lite.json").write_text(json.dumps(described))
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", "jupyterlite_core", "build", "--apps", "lab"]
        command += ["--contents", "files", "--no-sourcemaps", "--output-dir", str(target.resolve())]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def main() -> int:
    """Install JupyterLite, and build the pages if a target is given; what is missing is said in one line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", help="folder for the pages; without it they are not built")
    target = parser.parse_args().target
    try:
        install()
        if target is not None:
            build(target)
    except (OSError, subprocess.CalledProcessError) as problem:
        print(f"the site has no notebooks that run in the browser: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

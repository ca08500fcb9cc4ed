"""Pyodide in node, for tests: skipped with the reason where node or Pyodide is missing."""

import json
import shutil
import subprocess

import pytest

from workbench.apps.playground import runtime
from workbench.apps.playground.site import package_archive

SCRIPT = """
import fs from "node:fs";
const [folder, archive, wheel, program, given] = process.argv.slice(2);
const { loadPyodide } = await import(`${folder}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: `${folder}/` });
const extractDir = python.runPython("import site; site.getsitepackages()[0]");
for (const [path, format] of [[archive, "zip"], [`${folder}/${wheel}`, "wheel"]]) {
  python.unpackArchive(new Uint8Array(fs.readFileSync(path)), format, { extractDir });
}
python.globals.set("given", fs.readFileSync(given, "utf8"));
try {
  process.stdout.write(python.runPython(fs.readFileSync(program, "utf8")));
} catch (problem) { // left uncaught, node prints the line that threw: a megabyte
  process.stderr.write(problem.message);
  process.exitCode = 1;
}
"""


def need_pyodide():
    """Skip the test if Pyodide has not been fetched; its folder otherwise."""
    if not runtime.is_fetched():
        pytest.skip("Pyodide is not here: fetch it once with `workbench playground --fetch`")
    return runtime.runtime_folder()


def run_in_pyodide(program, given, folder):
    """Run a program, whose last line is a JSON text, with the JSON value ``given`` in the package's page modules."""
    pyodide = need_pyodide()
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    (folder / "workbench.zip").write_bytes(package_archive())
    (folder / "run.mjs").write_text(SCRIPT)
    (folder / "program.py").write_text(program)
    (folder / "given.json").write_text(json.dumps(given))
    files = [folder / name for name in ("program.py", "given.json")]
    arguments = [pyodide, folder / "workbench.zip", runtime.MSGSPEC_WHEEL, *files]
    done = subprocess.run(
        [node, folder / "run.mjs", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)

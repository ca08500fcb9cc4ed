"""Versions of installed packages equal those of importlib.metadata."""

import subprocess
import sys
from importlib.metadata import distributions, version

from workbench.base.installed import installed_version


def test_versions_of_all_installed_packages_are_those_of_their_metadata():
    names = {distribution.metadata["Name"] for distribution in distributions()}
    assert len(names) > 50
    for name in names:
        assert installed_version(name) == version(name), name
    assert installed_version("SciPy_OpenBLAS32") == version("scipy-openblas32")
    assert installed_version("no-such-package-here") is None


def test_the_first_folder_of_the_path_counts(tmp_path, monkeypatch):
    for number, folder in enumerate(("first", "second"), 1):
        (tmp_path / folder / f"left.pad-{number}.0+cpu.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert installed_version("left-pad") == "2.0+cpu"


def test_no_metadata_is_imported():
    code = (
        "import sys; from workbench.base.installed import installed_version; version = installed_version('numpy'); "
        "print(version, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [version("numpy"), "False"]

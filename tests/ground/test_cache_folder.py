"""The cache folder is this user's: code is run from it."""

import os
import stat
import sys

import pytest

from workbench.ground import cache_folder as module
from workbench.ground.cache_folder import UnsafeCacheFolder, cache_folder, make_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "above" / "cache"
    monkeypatch.setenv("WORKBENCH_CACHE", str(path))
    return path


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o720])
def test_a_folder_that_others_can_write_is_refused(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(UnsafeCacheFolder, match=f"{folder} belongs to user {os.getuid()} with mode 0{mode:o}; .*"):
        cache_folder()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_our_own_is_accepted(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert cache_folder() == folder


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: owner + 1)
    with pytest.raises(UnsafeCacheFolder, match=f"belongs to user {owner} .* must belong to user {owner + 1}"):
        cache_folder()


def test_folders_are_made_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        make_folder(cache_folder() / "compiled" / "sources")
    finally:
        os.umask(before)
    for made in (folder.parent, folder, folder / "compiled", folder / "compiled" / "sources"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700

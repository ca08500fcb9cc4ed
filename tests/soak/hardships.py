"""Trouble that a machine makes for a server and its clients, beside the attacks of hostile.py.

Processes of clients are stopped and continued, the disk of the access log and of the recorded trace fills up, the clock
jumps, a hunt takes every processor time that is left, and the cache folder can be written by others for a moment.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

DISK = "1m"
"""Size of the disk that fills up."""

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
SLEEP_CODE = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
  return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}
"""
"""libfaketime 0.9.10 makes a sleep until a monotonic time fail with EINVAL while it leaves that clock alone."""

JUMPS = ("+0", "+3600", "-3600", "+2592000", "-86400", "+30")
"""Seconds by which the clock of the server is off, one after another; the monotonic clock is left alone, as by NTP."""

LOAD_CODE = "from workbench.ground.cache_folder import cached; cached('kernels')"


class Hardships:
    """They begin with ``begin`` and end with ``end``; what they need is in a folder that must exist as long.

    Attributes:
        counts: Events by name.
        environment: Of the server: its clock.
        settings: Of the server: its access log, on a disk that fills up; empty if none can be mounted.
        trace: File to which its trace is recorded, on the same disk.
    """

    def __init__(self, folder):
        self.counts, self._over, self._threads = Counter(), threading.Event(), []
        self._folder, self._disk, self._clock = folder, folder / "disk", folder / "clock"
        self.environment = dict(os.environ)
        self._clock_jumps = FAKETIME is not None and (compiler := shutil.which("cc")) is not None
        if self._clock_jumps:
            self._clock.write_text("+0")
            sleep = folder / "sleep.so"
            command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(sleep)]
            subprocess.run(command, input=SLEEP_CODE, text=True, check=True)
            self.environment |= {"LD_PRELOAD": f"{sleep} {FAKETIME}", "FAKETIME_TIMESTAMP_FILE": str(self._clock)}
            self.environment |= {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self._disk)]
        mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True).returncode == 0
        self._is_mounted = mounted
        self.settings = {"access_log": str(self._disk / "access")} if mounted else {}
        self.trace = str(self._disk / "trace.jsonl") if mounted else ""
        self._hunt = None

    def begin(self, stoppable, processors):
        """Begin.

        Args:
            stoppable: Processes of clients.
            processors: Those that the hunt may use; empty for all.
        """
        for work in (lambda draw: self._stop_one(stoppable, draw), self._jump, self._open_the_cache):
            self._threads.append(threading.Thread(target=self._repeat, args=(work,)))
            self._threads[-1].start()
        command = ["nice", "-n", "19", sys.executable, "-m", "workbench", "hunt", "-j", "1", "--for", "600m"]
        self._hunt = subprocess.Popen(
            [*command, "--out", str(self._folder / "hunt")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if processors:
            os.sched_setaffinity(self._hunt.pid, processors)

    def _repeat(self, work):
        draw = random.Random(work.__code__.co_firstlineno)
        while not self._over.wait(draw.uniform(2, 8)):
            work(draw)

    def _stop_one(self, stoppable, draw):
        process = draw.choice(stoppable)
        process.send_signal(signal.SIGSTOP)
        self._over.wait(draw.uniform(0.5, 8))
        process.send_signal(signal.SIGCONT)
        self.counts["processes of clients stopped and continued"] += 1

    def _jump(self, draw):
        if self._clock_jumps:
            self._clock.write_text(JUMPS[self.counts["jumps of the clock"] % len(JUMPS)])
            self.counts["jumps of the clock"] += 1

    def _open_the_cache(self, draw):
        """Others may write in a cache folder: nothing may be loaded from it."""
        cache = self._folder / "cache"
        cache.mkdir(exist_ok=True)
        cache.chmod(0o777)
        loading = subprocess.run(
            [sys.executable, "-c", LOAD_CODE], env={**os.environ, "WORKBENCH_CACHE": str(cache)}, capture_output=True
        )
        refused = b"UnsafeCacheFolder" in loading.stderr
        self.counts["open cache folders refused" if refused else "open cache folders USED"] += 1

    def end(self):
        """End them; returns the share of the disk that is in use."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._hunt is not None:
            self.counts["the hunt was still running"] += self._hunt.poll() is None
            self._hunt.terminate()
            self._hunt.wait(60)
        if not self._is_mounted:
            return None
        found = os.statvfs(self._disk)
        return round(1 - found.f_bavail / found.f_blocks, 3)

    def release(self):
        """Unmount the disk."""
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=False)

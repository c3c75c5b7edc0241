# `make help` lists the targets. All work in .venv, made by the first that needs it.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The environment with the CUDA build of torch, for the imitated CUDA machine.
VENV_CUDA ?= .venv-cuda

.DEFAULT_GOAL := help
.PHONY: help demo test check format golden site browser mock-cuda gpu versions ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/pytest: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[test]'
	@touch $@

demo: $(BIN)/pytest ## train a small GPT on 4 local ranks and draw its plan
	$(BIN)/autoshard demo

test: $(BIN)/pytest ## run the tests
	$(BIN)/pytest -n 2

check: $(BIN)/pytest ## style, format, types, one-way imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(BIN)/pytest ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(BIN)/pytest ## rewrite golden files with what the tests get; read the diff
	$(BIN)/pytest --update-golden

# For tests of reports; apt as root. Where there is another Chromium or Chrome, only the second line is needed.
browser: ## install Debian's Chromium and playwright-core, with which reports are tested
	which chromium || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium)
	npm install --no-save --no-audit --no-fund --prefix build/browser playwright-core@1.65

site: $(BIN)/pytest ## build the documentation as a site, into site/
	$(BIN)/pip install -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

# `===`: the CUDA build, as the index names it.
$(VENV_CUDA)/bin/pytest:
	$(PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/pip install 'torch===2.13.0'
	grep -v '^torch==' constraints.txt >$(VENV_CUDA)/constraints.txt
	$(VENV_CUDA)/bin/pip install -c $(VENV_CUDA)/constraints.txt -e . transformers accelerate lightning pytest

# PARTS: some of the checks only, such as PARTS='graphs jobs'.
mock-cuda: $(VENV_CUDA)/bin/pytest $(BIN)/pytest ## the CUDA path on an imitated CUDA machine (needs gcc)
	$(BIN)/python tests/mock_cuda/run.py --venv $(VENV_CUDA) --laptop $(BIN)/python $(PARTS)

ci: ## everything CI does, in a fresh copy and a fresh environment
	.ci/run

# A machine with GPUs may have torch and no package index: what $(PYTHON) has is used as it is.
gpu: ## run the tests that need GPUs and write benchmarks/results/gpu-results.md; PYTHON=... with torch is used as it is
	@if $(PYTHON) -c 'import torch, pytest, highspy'; then $(PYTHON) -m benchmarks.gpu $(ARGS); \
	else $(MAKE) $(BIN)/pytest && $(BIN)/python -m benchmarks.gpu $(ARGS); fi

versions: ## run the tests on other versions of torch and Python and write docs/versions.md (hours; ARGS=--quick)
	$(PYTHON) -m tests.versions.run $(ARGS)

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache

# Each target prepares what it needs: on a fresh machine `make train` or `make test` is all there is to type.

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
TORCH := requirements/torch.txt
INSTALLED := $(VENV)/.installed

RECIPE ?= mxfp4_rht_sr
RUN := runs/gpt_tiny-$(RECIPE)
ARGS ?=
# more than cores: some tests wait for others' processes
TEST_WORKERS ?= 4
TESTS ?= tests
MEGATRON_CORE ?= $(shell sed -n 's/^megatron-core==\([0-9.]*\); python_version >= .*/\1/p' $(LOCK))
RELEASE = $(VENV)/megatron-core-$(MEGATRON_CORE)
TRITON ?= 3.9.0
RELEASE_TESTS ?= tests/mcore tests/distributed/test_driver.py tests/training/run tests/training/checkpoint tests/clients
LAYOUT_PARITY ?=
OPTIONAL := wandb,datasets,sentencepiece,peft,torchtitan
FUZZ ?= --mutations 500 --out docs/results/fuzz.md
FAULT_INJECTION ?= --kills 30 --kills-in-save 10 --out docs/results/fault-injection.md

# Tests start hundreds of processes that import this package: its bytecode is written, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Names are tried by running them: a name on the PATH may be a shim without an interpreter behind it.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11, 4) <= sys.version_info[:3] < (3, 14))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	"$$name" -c '$(SUPPORTED)' 2>/dev/null && echo "$$name" && break; done)

# The Python part of TransformerEngine, 1.2 MB, for tests without a GPU: it cannot be installed without the rest.
TE_VERSION := $(shell sed -n 's/.*transformer-engine\[pytorch\]==\([0-9.]*\)".*/\1/p' pyproject.toml)
TE_WHEEL := $(VENV)/transformer_engine-$(TE_VERSION)-py3-none-any.whl

# Threads for each of $(1) processes. torchrun would set 1, and print a banner about it.
threads = cores=$$(getconf _NPROCESSORS_ONLN); \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$((cores > $(1) ? cores / $(1) : 1))}

.PHONY: help setup train test test-weekly test-fast test-clients test-megatron-core test-optional test-fault-injection test-layout-parity test-compile test-block-scaled test-fuzz lint types format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## */  make \1: /p' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## make .venv: locked versions, and this package as editable

$(INSTALLED): $(LOCK) $(TORCH) pyproject.toml setup.py | $(BIN)/python
	@echo "installing $(LOCK) into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(LOCK)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
	@echo "installed; '. $(VENV)/bin/activate' for the commands of the README"

$(BIN)/python:
	@"$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null || { \
		echo "make: PYTHON='$(PYTHON)' is not Python 3.11 from 3.11.4 on, 3.12 or 3.13 with venv, which $(LOCK) needs;" \
			"install one (python3-venv too, on Debian) or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(TE_WHEEL): | $(BIN)/python
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV) \
		transformer-engine==$(TE_VERSION) || echo "make: the tests of TransformerEngine's Python part are skipped" >&2

train: setup  ## train gpt_tiny with RECIPE on every GPU, or as 2 processes on a CPU; more flags in ARGS
	@$(BIN)/python -m megatron_lowprec train --recipe $(RECIPE) $(ARGS)
	@$(BIN)/python tools/plot_loss.py $(RUN)

# mypy takes one core for most of a minute: it runs beside the tests.
test: setup lint $(TE_WHEEL)  ## lint, types and all tests but further cases (test-weekly); those marked gpu where there is one
	@$(BIN)/mypy & types=$$!; \
	gpu=$$($(BIN)/python -c 'import torch; print("" if torch.cuda.is_available() else " and not gpu")'); \
	$(call threads,$(TEST_WORKERS)); export TRANSFORMER_ENGINE=$(CURDIR)/$(TE_WHEEL); \
	$(BIN)/python -m pytest -q -rs -n $(TEST_WORKERS) --dist worksteal -m "not weekly$$gpu" $(TESTS); tests=$$?; \
	wait $$types || { echo 'mypy found errors: its lines stand above' >&2; exit 1; }; exit $$tests

test-weekly: setup $(TE_WHEEL)  ## as test, with the further cases that a workflow runs each week: a third longer
	@$(call threads,$(TEST_WORKERS)); export TRANSFORMER_ENGINE=$(CURDIR)/$(TE_WHEEL); \
	$(BIN)/python -m pytest -q -rs -n $(TEST_WORKERS) --dist worksteal -m "not gpu" $(TESTS)

test-fast: setup $(TE_WHEEL)  ## only unit tests: no process is started, no model is trained; under two minutes on two cores
	@$(call threads,$(TEST_WORKERS)); export TRANSFORMER_ENGINE=$(CURDIR)/$(TE_WHEEL); \
	$(BIN)/python -m pytest -q -rs -n $(TEST_WORKERS) --dist worksteal -m "not gpu and not slow" $(TESTS)

test-clients: setup  ## Megatron-LM under recipes; MEGATRON_LM is a folder or tarball of it, else it is cloned
	@$(call threads,$(TEST_WORKERS)); export MEGATRON_LM=$${MEGATRON_LM:-clone}; \
	$(BIN)/python -m pytest -q -rs -n $(TEST_WORKERS) --dist worksteal tests/clients

# The wheel is unpacked and comes before the installed release. From 0.17 on wheels are for Python 3.12 and later, but
# their Python code runs under 3.11; the one compiled helper is then the installed release's.
test-megatron-core: setup  ## layers, runs, checkpoints and clients with MEGATRON_CORE=RELEASE; the lock's newest without it
	@test -d $(RELEASE)/megatron || { rm -rf $(RELEASE) && \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
			--python-version 3.12 --dest $(RELEASE) megatron-core==$(MEGATRON_CORE) && \
		$(BIN)/python -m zipfile -e $(RELEASE)/*.whl $(RELEASE); }
	@cp -n "$$($(BIN)/python -W ignore -c 'import megatron.core.datasets.helpers_cpp as compiled; print(compiled.__file__)')" \
		$(RELEASE)/megatron/core/datasets/
	@$(call threads,$(TEST_WORKERS)); export MEGATRON_LM=$${MEGATRON_LM:-clone} PYTHONPATH=$(CURDIR)/$(RELEASE):$(CURDIR); \
	$(BIN)/python -m pytest -q -rs -n $(TEST_WORKERS) --dist worksteal -m "not gpu" $(RELEASE_TESTS)

# These bring some fifty packages and 500 MB: too much for the lock.
test-optional:  ## W&B, datasets, SentencePiece, peft, accelerate and torchtitan by the packages themselves, in a venv of its own
	@test -x $(VENV)-optional/bin/python || "$(PYTHON)" -m venv $(VENV)-optional
	@$(VENV)-optional/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(LOCK)
	@$(VENV)-optional/bin/python -m pip install --quiet --disable-pip-version-check -r $(TORCH)
	@$(VENV)-optional/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[$(OPTIONAL)]'
	@$(VENV)-optional/bin/python -c 'import accelerate, $(OPTIONAL)'  # what is missing would be skipped
	@$(VENV)-optional/bin/python -m pytest -q -rs -m "not gpu" tests/training/monitoring/test_wandb.py \
		tests/tools/test_prepare_wikipedia.py tests/training/data/test_tokenizer.py tests/linear/test_peft.py \
		tests/linear/test_trainers.py tests/test_torchtitan.py tests/docs/test_recipes.py

test-fault-injection: setup  ## kill, interrupt and damage small runs, half an hour; FAULT_INJECTION are flags of tools/fault_injection
	@$(BIN)/python -m tools.fault_injection $(FAULT_INJECTION)

test-layout-parity: setup  ## every recipe on every layout against one process, half an hour on two cores; LAYOUT_PARITY are flags of tools/layout_parity
	@$(BIN)/python -m tools.layout_parity $(LAYOUT_PARITY)

test-compile: setup  ## every kernel compiled for Hopper and Blackwell, without a GPU, three minutes
	@for arch in 90 100; do $(BIN)/python -W ignore -m tests.kernels.compile_only $$arch || exit 1; done

# Into a folder of its own, which comes before the installed one: the instructions that another release compiles.
test-block-scaled: setup  ## instructions of the block-scaled GEMMs for Blackwell under TRITON=RELEASE, a minute
	@test -d $(VENV)/triton-$(TRITON) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	@PYTHONPATH=$(CURDIR)/$(VENV)/triton-$(TRITON):$(CURDIR) $(BIN)/python -m pytest -q -rs \
		tests/kernels/test_mx_gemm.py -k instructions

test-fuzz: setup  ## damaged and hostile files for every reader, 500 each, ten minutes on an idle core; FUZZ are flags of tools/fuzz
	@$(BIN)/python -W ignore -m tools.fuzz $(FUZZ)

lint: setup  ## ruff: rules and layout
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: setup  ## mypy
	@$(BIN)/mypy

format: setup  ## let ruff mend what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:  ## remove .venv, caches and prepared data; runs/ stays
	rm -rf $(VENV) build *.egg-info data/cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

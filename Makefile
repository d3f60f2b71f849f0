# make run    train the small model on real text and compare: out/train.json, out/train.png
# make test   the tests, within 15 minutes
# make check  ruff and mypy            make format  let ruff repair what it can
# make bench  every method beside plain collectives, async-TP and padding: out/bench.json, out/bench.png
# Each sets up .venv first where that is missing or older than pyproject.toml. PYTHON=... picks the interpreter.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# The CPU build of torch. Exactly this spelling: a looser one makes pip fetch a CUDA build of several GB.
CPU_TORCH := torch==2.13.0
# Its interpreter runs the kernels' tests without a GPU. Without its needs: torch is there.
CPU_TRITON := triton==3.9.0

# Ranks are processes; more than one thread in each would only fight for the cores.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: help setup run test check format bench clean

help:
	@sed -n '1,5s/^# //p' Makefile

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"tpoverlap needs Python 3.11 or later, $(PYTHON) is {sys.version}")'
	if nvidia-smi -L >/dev/null 2>&1; then
	  # The machine's own torch fits its driver: use it where there is one, else what PyPI gives.
	  if $(PYTHON) -c 'import torch' 2>/dev/null; then $(PYTHON) -m venv --system-site-packages $(VENV); torch=
	  else $(PYTHON) -m venv $(VENV); torch='torch>=2.11'; fi
	else
	  $(PYTHON) -m venv $(VENV); torch='$(CPU_TORCH)'
	fi
	pip="$(BIN)/python -m pip --disable-pip-version-check"
	if [ -n "$$torch" ]; then $$pip install --quiet "$$torch"; fi
	if [ "$$torch" = '$(CPU_TORCH)' ]; then $$pip install --quiet --no-deps '$(CPU_TRITON)'; fi
	# Keeps pip from replacing that torch while it resolves everything else.
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	$$pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $@

run: $(READY)
	@mkdir -p out
	$(BIN)/tpoverlap train --check-reference --compare --json out/train.json --plot out/train.png

test: $(READY)
	@timeout --kill-after=15 900 $(BIN)/python -m pytest tests

check: $(READY)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	@mkdir -p out
	$(BIN)/tpoverlap bench --suite gemm --suite dynamic --suite host --json out/bench.json --plot out/bench.png

clean:
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# `make demo` and `make test` each do all their set-up. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-core test-torch lint gpu clean

# For `make gpu`: the machine's own python with torch, triton, cuda-bindings; nothing is installed, no network needed.
GPU_PYTHON ?= python3
BUDGET_S ?= 240
OUT ?= runs/gpu

# Stamps: repeated only when the requirements change.
$(VENV)/.base: pyproject.toml requirements/base.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/base.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base requirements/test.txt
	$(PIP) install -r requirements/test.txt
	@touch $@

demo: $(VENV)/.base
	$(BIN)/bullet-sim compare --trace azure-code --rate 5 --num-requests 1000 \
	    --policies bullet,sglang-1024,sglang-2048,vllm-1024 --out runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# All but the tests of the profiler (those that need torch skip themselves without it).
test-core: $(VENV)/.test
	$(BIN)/python -m pytest --ignore=tests/runtime --ignore=tests/kernels

# The profiler's tests with torch (CPU build) and triton, in an environment of their own.
test-torch:
	@test -x .venv-torch/bin/python || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip -q install torch==2.13.0
	.venv-torch/bin/python -m pip -q install -r requirements/gpu-test.txt
	.venv-torch/bin/python -m pip -q install --no-deps -e .
	.venv-torch/bin/python -m pytest tests/runtime tests/kernels tests/test_tables.py

gpu:
	$(GPU_PYTHON) -m bullet.profile_cli gpu --budget-s $(BUDGET_S) --out $(OUT)

clean:
	rm -rf $(VENV)

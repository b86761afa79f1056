# `make demo` and `make test` each do all their set-up. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint clean

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

clean:
	rm -rf $(VENV)

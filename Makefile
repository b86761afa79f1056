# `make demo` and `make test` each do all their set-up. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: gpu-validate demo test test-core test-torch test-triton39 lint gpu clean

# For the tests that need torch: a CPU build, in an environment of its own (1.9 GB). Where plain `torch` is a CUDA build of
# several gigabytes, name an index of CPU builds as pip takes it: make test TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
TORCH_VENV := .venv-torch

# For `make gpu`: the machine's own python with torch, triton, cuda-bindings; nothing is installed, no network needed.
# GPU_ARGS: further options of `bullet-profile gpu`, as --allow-busy.
GPU_PYTHON ?= python3
BUDGET_S ?= 240
OUT ?= runs/gpu
GPU_ARGS ?=
# The engine's share of BUDGET_S, after the co-run matrix: two fifths; 0: no engine, as where that is too little for a run.
ENGINE_S ?= $(shell s=$$(($(BUDGET_S) * 2 / 5)); [ $$s -ge 60 ] && echo $$s || echo 0)
# --foreground: the signal reaches the command once; it then ends its step, keeps its rows and closes the device.
VALIDATE = timeout --foreground -s INT -k 20 $(1) $(GPU_PYTHON) -m bullet.cli.run validate --device cuda --budget-s $(1) \
    $(filter --allow-busy,$(GPU_ARGS)) --out $(OUT)-engine-$$(date +%Y%m%d-%H%M%S)

# Stamps: repeated only when the requirements change.
$(VENV)/.base: pyproject.toml requirements/base.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/base.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base requirements/test.txt
	$(PIP) install -r requirements/test.txt
	@touch $@

# torch first and alone: what it needs comes from where it comes from.
$(TORCH_VENV)/.test: pyproject.toml requirements/gpu-test.txt
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install $(TORCH)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install -r requirements/gpu-test.txt
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	@touch $@

demo: $(VENV)/.base
	$(BIN)/bullet-sim compare --trace azure-code --rate 5 --num-requests 1000 \
	    --policies bullet,sglang-1024,sglang-2048,vllm-1024 --out runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

# Everything: the whole suite without torch (what needs it skips itself), then what needs it.
test: lint test-core test-torch

test-core: $(VENV)/.test
	$(BIN)/python -m pytest

# The profiler with torch and triton: no kernel runs, Triton compiles for sm_80, sm_89 and sm_90 without a GPU.
test-torch: $(TORCH_VENV)/.test
	$(TORCH_VENV)/bin/python -m pytest tests/runtime tests/kernels tests/test_tables.py

# The same kernels on Triton 3.9, by hand: an environment of its own. (3.9 warns where the default of its fusion is unset.)
test-triton39:
	@test -x .venv-triton39/bin/python || $(PYTHON) -m venv .venv-triton39
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install $(TORCH)
	grep -v '^triton' requirements/gpu-test.txt > .venv-triton39/requirements.txt
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install -r .venv-triton39/requirements.txt triton==3.9.0
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	TRITON_DEFAULT_FP_FUSION=1 .venv-triton39/bin/python -m pytest tests/kernels

# Check, co-run sweep, then the engine on this card under the policies of docs/runtime.md, all within BUDGET_S. Whatever
# befalls the engine, the sweep's rows are there, its summary is printed last and the status is its own; what the engine
# says goes to $(OUT)-engine.txt. Without simpy it is only measured: `bullet-run validate --from FOLDER` makes the table elsewhere.
gpu:
	$(GPU_PYTHON) -m bullet.cli.profile gpu --budget-s $$(($(BUDGET_S) - $(ENGINE_S))) --out $(OUT) $(GPU_ARGS)
	-@if [ $(ENGINE_S) -gt 0 ]; then $(call VALIDATE,$(ENGINE_S)) >> $(OUT)-engine.txt 2>&1; \
	    echo "engine: exit status $$?, what it said is in $(OUT)-engine.txt"; else echo "no engine: ENGINE_S = $(ENGINE_S)"; fi

# The engine alone, with all of BUDGET_S.
gpu-validate:
	$(call VALIDATE,$(BUDGET_S))

clean:
	rm -rf $(VENV) $(TORCH_VENV) .venv-triton39

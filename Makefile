# `make demo` and `make test` each do all their set-up. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Tests run in so many processes; auto: one a core.
JOBS ?= auto

.PHONY: lockstep gpu-validate gpu-plan demo notebooks dist test test-core test-torch test-triton39 lint gpu clean

# For the tests that need torch: a CPU build, in an environment of its own (1.9 GB). Where plain `torch` is a CUDA build of
# several gigabytes, name an index of CPU builds as pip takes it: make test TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
TORCH_VENV := .venv-torch

# For `make gpu`: the machine's own python with torch, triton, cuda-bindings; nothing is installed, no network needed.
# GPU_ARGS: further options of `bullet-profile stages`, as --no-engine, or --device simulated to try it without a card.
GPU_PYTHON ?= python3
BUDGET_S ?= 600
OUT ?= runs/gpu
GPU_ARGS ?= --allow-busy

# Stamps: repeated only when the requirements change.
$(VENV)/.base: pyproject.toml requirements/base.txt
	@echo "setting up $(VENV), once: about a minute"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements/base.txt
	@$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base requirements/test.txt
	@$(PIP) install -r requirements/test.txt
	@touch $@

$(VENV)/.notebooks: $(VENV)/.base
	@echo "installing jupyterlab into $(VENV), once: about a minute"
	@$(PIP) install -e '.[notebooks]'
	@touch $@

# torch first and alone: what it needs comes from where it comes from.
$(TORCH_VENV)/.test: pyproject.toml requirements/gpu-test.txt
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install $(TORCH)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install -r requirements/gpu-test.txt
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	@touch $@

DEMO = --trace azure-code --rate 5 --num-requests 1000 --policies bullet,sglang-1024,sglang-2048,vllm-1024
demo: $(VENV)/.base
	@out=runs/demo-$$(date +%Y%m%d-%H%M%S); $(BIN)/bullet-sim compare $(DEMO) --out $$out && printf '%s\n' '' \
	    "open      $$out/report.html          the plots of it all, one page" \
	    "          $$out/bullet/trace.json    the timeline, in ui.perfetto.dev" \
	    'try next  $(BIN)/bullet-sim compare --trace sharegpt --rate 16 --policies bullet,vllm-1024,static-96' \
	    '          make notebooks             the same from Python' \
	    '          docs/add-a-policy.md       a scheduler of your own, in 25 lines'

# Needs the network, once, as the demo does.
notebooks: $(VENV)/.notebooks
	$(BIN)/jupyter lab notebooks

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

# Everything: the whole suite without torch (what needs it skips itself), then what needs it.
test: lint test-core test-torch

test-core: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS)

# sdist and wheel in dist/, the wheel tried in an environment of its own, outside the repository.
dist: $(VENV)/.test
	@rm -rf dist .venv-dist
	@mkdir dist && $(BIN)/python -m build --no-isolation --outdir dist . > dist/log 2>&1 || { cat dist/log; exit 1; }
	@rm dist/log
	@$(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip --disable-pip-version-check -qq install -r requirements/base.txt dist/*.whl
	@folder=$$(mktemp -d) && bin=$$PWD/.venv-dist/bin && cd $$folder && $$bin/bullet-sim --help > help.txt && \
	    $$bin/bullet-sim run --num-requests 50 --out run --quiet > run.txt && test -s run/report.html && \
	    $$bin/bullet-profile show --gpu h100 > show.txt && $$bin/bullet-run --help > run-help.txt && rm -r $$folder
	@ls dist

# The profiler with torch and triton: no kernel runs, Triton compiles for sm_80, sm_89 and sm_90 without a GPU.
test-torch: $(TORCH_VENV)/.test
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n $(JOBS) tests/runtime tests/kernels tests/test_tables.py

# The same kernels on Triton 3.9, by hand: an environment of its own. (3.9 warns where the default of its fusion is unset.)
test-triton39:
	@test -x .venv-triton39/bin/python || $(PYTHON) -m venv .venv-triton39
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install $(TORCH)
	grep -v '^triton' requirements/gpu-test.txt > .venv-triton39/requirements.txt
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install -r .venv-triton39/requirements.txt triton==3.9.0
	.venv-triton39/bin/python -m pip --disable-pip-version-check -q install --no-deps -e .
	TRITON_DEFAULT_FP_FUSION=1 .venv-triton39/bin/python -m pytest tests/kernels

# Proof, co-run matrix, controls and SM axis; the project's own kernels; the engine: each in a process of its own, all within
# BUDGET_S, all under OUT in at most eight files. The same command again resumes.
gpu:
	$(GPU_PYTHON) -m bullet.cli.profile stages --budget-s $(BUDGET_S) --out $(OUT) $(GPU_ARGS)

# What that would measure, and when; needs no card.
gpu-plan:
	$(GPU_PYTHON) -m bullet.cli.profile stages --plan-only --gpu h200 --budget-s $(BUDGET_S) $(GPU_ARGS)

# The engine alone, with all of BUDGET_S. --foreground: the signal reaches the command once; it then ends its step, keeps its
# rows and closes the device.
gpu-validate:
	timeout --foreground -s INT -k 20 $(BUDGET_S) $(GPU_PYTHON) -m bullet.cli.run validate --device cuda \
	    --budget-s $(BUDGET_S) $(filter --allow-busy,$(GPU_ARGS)) --out $(OUT)-engine-$$(date +%Y%m%d-%H%M%S)

# Our vllm-N and sglang-N beside the published schedulers, which pip downloads into .lockstep/ (ignored by git), step by step.
LOCKSTEP_WORLDS ?= 1000
lockstep: $(VENV)/.base
	$(BIN)/python -m benchmarks.lockstep --worlds $(LOCKSTEP_WORLDS)

clean:
	rm -rf $(VENV) $(TORCH_VENV) .venv-triton39 .venv-dist dist

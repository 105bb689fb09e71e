# Everything runs from .venv, which is made on first use and again when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
MEGATRON := .venv-megatron

.PHONY: demo docs test test-slow test-megatron test-torch try-megatron lint format clean

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/demo.sh

docs: .venv/docs-installed
	$(BIN)/python docs/site/build.py

# Tests start hundreds of processes, so that bytecode is written even where the environment says not to.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Megatron's own validation judges what we export: an environment of its own, with the wheels of every release that we
# support. THREEFOLD_SEED=n draws other plans.
test-megatron: $(STAMP) $(MEGATRON)/installed
	MEGATRON_HOME=$(CURDIR)/$(MEGATRON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/megatron

# make try-megatron BRIDGE=0.7.0 CORE=0.20.0: which rules a new release moves, and which plans it judges otherwise.
try-megatron: $(STAMP) $(MEGATRON)/installed
	$(BIN)/python tests/megatron/get_wheels.py $(MEGATRON)/wheels $(BRIDGE) $(CORE)
	$(BIN)/python tools/upstream.py $(MEGATRON)/wheels
	MEGATRON_HOME=$(CURDIR)/$(MEGATRON) OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/megatron/try_release.py $(BRIDGE)

# make test-torch TORCH=2.11: what torch decides (models, layouts, pipelines, FSDP, checkpoints, rehearsals) on another
# release of it, in an environment of its own. Where the registry has no CPU build this pulls gigabytes of CUDA libraries.
TORCH ?= 2.11
OTHER := .venv-torch-$(TORCH)
SMOKE := tests/engine/models tests/engine/dispatch tests/engine/data_parallel tests/engine/schedule \
  tests/engine/shard tests/engine/verify/test_oracle.py tests/engine/run/test_checkpoints.py \
  tests/engine/run/test_reshard.py tests/engine/optim tests/engine/test_train.py tests/dryrun/test_rehearse_rank.py

test-torch: $(OTHER)/installed
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n auto --dist worksteal -m "not slow" $(SMOKE)

$(OTHER)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==\|^triton==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt 'torch==$(TORCH).*' --editable '.[dev,train]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

$(MEGATRON)/installed: constraints-megatron.txt threefold/interop/megatron/wheel_fields.json | $(STAMP)
	$(PYTHON) -m venv $(MEGATRON)
	$(MEGATRON)/bin/python -m pip install --quiet $$(sed 's/ *#.*//' constraints-megatron.txt)
	$(BIN)/python tests/megatron/get_wheels.py $(MEGATRON)/wheels
	touch $@

clean:
	rm -rf .venv .venv-megatron .venv-torch-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train]'
	touch $@

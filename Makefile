# Everything runs from .venv, which is made on first use and again when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
MEGATRON := .venv-megatron

.PHONY: demo docs test test-slow test-megatron try-megatron lint format clean

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
	rm -rf .venv .venv-megatron build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train]'
	touch $@

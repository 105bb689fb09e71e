# Everything runs from .venv, which is made on first use and again when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo docs test test-slow lint format clean

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/demo.sh

docs: .venv/docs-installed
	$(BIN)/python docs/site/build.py

# Tests start hundreds of processes, so that bytecode is written even where the environment says not to.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

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

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train]'
	touch $@

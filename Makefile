# `make setup` once, then `make run` and `make test`. Every target works from a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
WORKERS ?= 2

.PHONY: setup run test test-gpu test-slow check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup-venv
	PYTHON="$(PYTHON)" scripts/setup-venv $(VENV)
	@touch $@

run: $(STAMP)
	$(BIN)/sparse-mla run $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(STAMP)
	scripts/check

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

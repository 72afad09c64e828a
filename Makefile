# Every target installs what it needs, so that each works in a fresh clone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
python := .venv/bin/python
say := @printf '== %s\n'

# tierd as installed for an engine, named by a hash of its files: a time stamp would not notice a
# deleted file.
wheel_id := $(shell find tierd backends connectors ops systemd docs pyproject.toml *.md LICENSE -type f \
	-not -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)
engine_site := build/engine-site/.complete-$(wheel_id)

# Evaluated inside recipes, so that other targets do not pay for it.
engine_python := TIERD_ENGINE_PYTHON="$${TIERD_ENGINE_PYTHON:-$$(engine/install.sh --where)}"

# The tests of one file run in one process: they share servers and engines.
parallel := -n 2 --dist loadfile

# Dead links and anchors fail the build.
build_site := NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

benches := $(filter-out common,$(basename $(notdir $(wildcard bench/[a-z]*.py))))

.PHONY: help
help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: .venv/.complete servers engine $(engine_site) ## Install tools, servers, the vLLM engine (2 min, 2.5 GB), tierd for it

.PHONY: lint
lint: .venv/.complete ## Check style, types, import layers, and the links of pages
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	.venv/bin/lint-imports
	$(build_site)

.PHONY: docs
docs: .venv/.complete ## Build the pages of docs/ into build/site, offline
	$(build_site)

.PHONY: tables
tables: .venv/.complete ## Rewrite the pages' tables and charts, from the code and bench/results
	$(python) -m pages.tables

.PHONY: test
test: setup ## Run the suite, the real engine included
	$(engine_python) $(python) -m pytest $(parallel) -m 'not long' $(ARGS)

.PHONY: test-slow
test-slow: setup ## Run the long tests: fleets, crashes, booted machines, more engines
	$(engine_python) $(python) -m pytest $(parallel) -m long $(ARGS)

.PHONY: test-fast
test-fast: .venv/.complete ## Run the tests that take under a quarter of a second each
	$(python) -m pytest -m 'not slow and not engine' $(ARGS)

.PHONY: demo
demo: setup ## Show a prefix that survives the engine's restart
	$(engine_python) $(python) demo/run.py $(ARGS)

.PHONY: bench
bench: setup $(patsubst %,bench-%,$(filter-out soak worlds,$(benches))) ## Run every benchmark but the soaks, or one: make bench-hashing

.PHONY: $(benches:%=bench-%)
$(benches:%=bench-%): bench-%: .venv/.complete
	$(engine_python) $(python) -m bench.$* $(ARGS)

SEEDS ?= 1000
.PHONY: sim-soak
sim-soak: .venv/.complete ## Run further simulated worlds, 1,000 (10 min) or SEEDS=...
	$(python) -m bench.worlds --seeds $(SEEDS) $(ARGS)

.PHONY: compat-identity
compat-identity: engine $(engine_site) ## Check the identity table with vLLM 0.29 to 0.33 installed (20 min, 3 GB)
	$(engine_python) $(python) -m tests.connectors.compat_identity $(ARGS)

# Without a GPU both print that and do nothing. The engine's process needs torch: name a Python that
# has it in TIERD_GPU_ENGINE_PYTHON, or run `python3 -m tests.gpu` with one that has all libraries.
.PHONY: gpu-test gpu-bench
gpu-test: .venv/.complete ## Check copies between processes on a GPU (6 min)
	$(python) -m tests.gpu

gpu-bench: bench-gpu ## Measure copies on a GPU (1 min)

# The tools, and tierd itself as an editable install, which makes its entry points visible to the
# tests.
.venv/.complete: requirements-dev.lock pyproject.toml
	$(say) 'installing the tools into .venv'
	@[ -x $(python) ] || $(PYTHON) -m venv .venv
	@$(python) -m pip install -qq --no-deps -r requirements-dev.lock
	@$(python) -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# The S3 servers are Python wheels of requirements-dev.lock; Redis is a system package.
.PHONY: servers
servers:
	@command -v redis-server >/dev/null || tests/support/servers/install_redis.sh

# engine/install.sh checks whether the engine is complete: it is outside of this checkout.
.PHONY: engine
engine:
	@[ -n "$${TIERD_ENGINE_PYTHON:-}" ] || engine/install.sh >/dev/null

# A wheel, installed to a folder on the engine's PYTHONPATH: the engine sees the plugin's entry point,
# and only the files of this checkout that the wheel contains.
$(engine_site): | .venv/.complete
	$(say) 'installing tierd for the engine into build/engine-site'
	@rm -rf build/engine-site
	@$(python) -m pip install -qq --no-deps --no-build-isolation --target build/engine-site .
	@touch $@

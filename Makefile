# `make train` sets up and runs the main job; `make test` sets up and passes every check. Both need python3 with venv, no more.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What tests/oracle compares with. Without their own dependencies: only plain torch functions of theirs are called.
ORACLES := liger-kernel==0.8.5 trl==1.16.0
# What tests/envs adapts. Their own requirements contradict constraints.txt; what they import comes with the dev extra.
ADAPTED := gem-llm==0.1.0 openenv==0.10.0

# One thread: the tensors of the tests are tiny, and two threads beside another process can be ten times slower than one.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup train test lint types unit format docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the package, editable, and all that the checks need

# Made again only when the dependencies change.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(ORACLES) $(ADAPTED)
	touch $@

train: $(READY) ## Run the main job; ARGS='...' reaches agilerl train
	$(BIN)/agilerl train $(ARGS)

test: lint types unit ## Run every check

lint: $(READY) ## Style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Types of the package
	$(BIN)/mypy

unit: $(READY) ## pytest, a process for each core; ARGS='tests/hpo -k tournament' narrows it
	$(BIN)/pytest --numprocesses auto --dist loadfile $(ARGS)

format: $(READY) ## Format the code and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Write docs/manifest.md anew from the code
	$(BIN)/python docs/generate_reference.py

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

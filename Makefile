# Kedge's tasks. `make help` lists them; every one that needs the environment makes it first.

# The newest release of PyTorch that the tests are known to pass with, beside the one in constraints.txt.
NEWEST := 2.14.1

# `make test TORCH=2.14.1`: any task with another PyTorch, in an environment of its own.
TORCH ?=

# `make test PYTHON=python3.13`: the same with another version of Python than that of .venv.
USUAL_PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PYTHON ?= $(USUAL_PYTHON)
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
OTHER_PYTHON :=
ifneq ($(PYTHON),$(USUAL_PYTHON))
NAMED := $(call version_of,$(PYTHON))
ifeq ($(NAMED),)
$(error $(PYTHON) cannot be started; name a Python that can: PYTHON=/path/to/python3)
endif
OTHER_PYTHON := $(filter-out $(call version_of,$(or $(USUAL_PYTHON),$(PYTHON))),$(NAMED))
endif

OTHERS := $(strip $(TORCH:%=torch-%) $(OTHER_PYTHON:%=python-%))
VENV := $(if $(OTHERS),build/$(subst $() ,-,$(OTHERS)),.venv)
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up

# The tests' networks are so small that a second thread costs more than it brings, and nothing is to be downloaded. Python is to
# keep what it compiles, even where it is told elsewhere not to: hundreds of programs import Kedge.
QUIET := HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# What is installed beside Kedge.
EXTRAS ?= test,dev,docs

# Many tests start programs and wait for them, so there are more processes than cores on a small machine.
WORKERS ?= 3
PYTEST := $(QUIET) $(BIN)/python -m pytest
AGAIN := --last-failed --last-failed-no-failures none

# So many of the slowest tests are named at the end.
SLOWEST ?= 10
SPREAD := -n $(WORKERS) --dist worksteal --durations=$(SLOWEST)

.DEFAULT_GOAL := help
.PHONY: help setup test test-all corners check lint types contract site docs generated demo bench mutants clean
MAKEFLAGS += --no-print-directory

help:  ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP)  ## make .venv with Kedge and everything its tests need
	@echo "ready: $(BIN)/kedge"

$(SETUP): pyproject.toml constraints.txt $(wildcard src/kedge/native/c/*.[ch]) src/kedge/native/c/CMakeLists.txt
	@test -n "$(PYTHON)" || { echo "Kedge needs Python 3.11 or newer; name one: make setup PYTHON=/path/to/python3"; exit 1; }
	@echo "making $(VENV) with $(PYTHON)$(if $(TORCH), and PyTorch $(TORCH)); the first time takes a few minutes, most of them for torch"
	@$(PYTHON) -m venv $(VENV)
	@sed $(if $(TORCH),'s/^torch==.*/torch==$(TORCH)/',-e '') constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Of what failed, only tests of measured durations are tried once more, alone; 5 is "no test is left".
test: setup  ## run the tests; TORCH=2.14.1 or PYTHON=python3.13 runs them with that one, in an environment of its own in build
	@echo "tests: pytest, with the examples of README.md and docs/, in $(WORKERS) processes$(if $(TORCH), on PyTorch $(TORCH))"
	@$(PYTEST) $(SPREAD) $(CASES) || { \
		$(PYTEST) $(AGAIN) -m "not measured" --collect-only -qq >/dev/null; \
		[ $$? = 5 ] && echo "what failed beside others is tried once more, alone" && $(PYTEST) $(AGAIN) -m measured; }

test-all: CASES := -m ""
test-all: test  ## run the tests with every case: all architectures, ranks and modes

# What touches every corner of PyTorch that Kedge uses and PyTorch does not promise; CONTRIBUTING.md says how it is chosen.
CORNERS := tests/architecture/test_corners.py tests/architecture/test_privates.py tests/architecture/test_upstream.py \
	tests/architecture/test_private_attributes.py tests/architecture/test_without_names.py \
	tests/hooks/test_checkpoint.py tests/hooks/test_nested_checkpoints.py tests/hooks/placing/test_strict_export.py \
	tests/hooks/gates/test_compiled.py tests/hooks/operations/test_ops_checkpoint.py \
	tests/hooks/operations/test_ops_functions.py tests/hooks/saved/test_saving_stacked.py tests/hooks/gates/test_scripted.py \
	tests/torch_internals/test_source.py tests/offload/test_checkpoint_inputs.py tests/offload/test_checkpoint_oneness.py \
	tests/native/test_device_kernel.py tests/native/test_on_device.py

corners: setup  ## run the tests of PyTorch's private corners alone; TORCH= as for test
	@echo "tests of PyTorch's private corners$(if $(TORCH), on PyTorch $(TORCH)), in $(WORKERS) processes"
	@$(PYTEST) $(SPREAD) $(CORNERS)

# The smallest environment in which those run: no integrations, no pictures, no architectures of transformers.
.PHONY: newest-setup newest-clean newest
ON_NEWEST := TORCH=$(NEWEST) EXTRAS=corners VENV=build/corners-$(NEWEST)

newest-setup:
	@$(MAKE) setup $(ON_NEWEST)

newest-clean:
	@rm -rf build/corners-$(NEWEST)

newest:  ## the tests of private corners on the newest release of PyTorch
	@$(MAKE) corners $(ON_NEWEST)

# The tests come after the rest: one of them checks types too, and finds what `types` has stored of PyTorch.
check: setup  ## all that must pass: lint, types, import contract, the site of the docs, tests
	@$(MAKE) --jobs=5 types collected lint contract site
	@$(MAKE) test

# pytest rewrites the assertions of each file when it first imports it; otherwise every process of the tests would.
.PHONY: collected
collected: setup
	@$(PYTEST) --collect-only -qq >/dev/null

lint: setup  ## check style and format
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "not formatted; to do it: $(BIN)/ruff format"; exit 1; }

types: setup  ## check types, strictly
	@echo "types: mypy"
	@$(BIN)/mypy --no-error-summary

contract: setup  ## check which folder may import which
	@echo "import contract: import-linter"
	@$(BIN)/lint-imports --no-logo

# Without its advertisement of a successor: CONTRIBUTING.md says more.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

site: setup  ## build the site of the docs, strictly, in build/site
	@echo "site: mkdocs"
	@$(MKDOCS) build --strict --quiet

# A browser is opened where there is a screen.
ADDRESS ?= 127.0.0.1:8000
SCREEN := $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname)))

docs: setup  ## build the site of the docs, strictly, and show it, with every change; ADDRESS=127.0.0.1:8000
	@$(MKDOCS) serve --strict --livereload --dev-addr $(ADDRESS) $(if $(SCREEN),--open)

generated: setup  ## write what the docs take from the source: the pages of rules, the import order and its picture
	@echo "generated: docs/reference/rules.md and the pages in docs/reference/rules with the rules' golden files, the import order and the lists in docs/explanation/how-it-works.md, docs/pictures/house.svg"
	@$(BIN)/python -m tests.rules.goldens
	@$(BIN)/python docs/pictures/house.py
	@$(BIN)/python docs/pictures/steps.py

demo: setup  ## watch a training with a mistake in it, then a healthy one, and see what Kedge says
	@$(MAKE) watched MODEL=log-of-zero RECORDING=build/demo-mistake.kedge OPTIONS=--force
	@$(MAKE) watched MODEL=healthy RECORDING=build/demo-healthy.kedge OPTIONS=--force

# `kedge run` ends with the script's own exit code: a training that dies must not end the demo.
.PHONY: watched
watched:
	@mkdir -p build
	@echo; echo "\$$ kedge run -o $(RECORDING) $(OPTIONS) examples/digits.py --model $(MODEL)"
	@$(BIN)/kedge run -o $(RECORDING) $(OPTIONS) examples/digits.py --model $(MODEL) || echo "(the script ended with $$?)"
	@echo; echo "\$$ kedge report $(RECORDING)"
	@$(BIN)/kedge report $(RECORDING)

# The hard case of each; benchmarks/RESULTS.md has what longer runs of the same programs gave.
bench: setup  ## measure what Kedge costs, in some minutes; more, by hand: benchmarks/{rivals,calibrate,page,capabilities}.py
	@echo "benchmarks: some minutes; use a machine that does nothing else"
	@echo; echo "one step, one event, one short run (benchmarks/overhead.py)"
	@$(BIN)/python benchmarks/overhead.py --rounds 15
	@echo; echo "whole runs, beside what people use instead (benchmarks/rivals.py)"
	@$(BIN)/python benchmarks/rivals.py --models mlp --rounds 3
	@echo; echo "reading a large recording (benchmarks/reading.py)"
	@$(BIN)/python benchmarks/reading.py --steps 1000 --times 2

# What makes the mutants is installed when they are first asked for: nothing else needs it.
mutants: setup  ## measure the tests: how many of 120 small faults in a copy of the source they notice, in half an hour or so
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[mutants]'
	@echo "mutants: benchmarks/mutants.py; what was interrupted goes on where it stopped"
	@$(BIN)/python benchmarks/mutants.py

# Hostile recordings, data sets, command lines and selectors: tests/properties/fuzz.py. The tests try a hundred of each.
MINUTES ?= 5
DOORS ?=

.PHONY: fuzz
fuzz: setup  ## try ever new hostile input on each door, MINUTES=5 each; DOORS="recordings selectors" only those
	@echo "fuzz: $(MINUTES) minutes a door"
	@$(QUIET) $(BIN)/python -m tests.properties.fuzz $(MINUTES) $(DOORS)

clean:  ## remove what the tasks made, .venv included
	@echo "removing $(VENV), build, dist and the tools' folders"
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@cd src/kedge/native && rm -rf *.so c/.cmake c/.ninja* c/.skbuild* c/CMakeCache.txt c/CMakeFiles c/CMakeInit.txt c/build.ninja c/cmake_install.cmake
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` need Python 3.11 or newer, make, and a package registry that pip can reach.

PYTHON ?= python3
VENV ?= .venv
# Further arguments, as in `make test ARGS="-k tree"` or `make demo ARGS="--budget 8"`.
ARGS ?=

PYTHON_IN_VENV := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Beside it: the oldest transformers that is supported, and the newest that there is.
OLDEST := $(VENV)-oldest
NEWEST := $(VENV)-newest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# Everything that these read is on disk, and two test workers with two threads each would fight over two cores.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := -m pytest -n logical --maxprocesses=4 --dist=worksteal
# What another transformers can change: all but the tests of the real model, its training and its demo.
VERSIONED := $(addprefix --ignore=tests/test_,acceptance.py demo.py examples.py real_pair.py smollm2.py \
	train_any_target.py train_drafter.py training_data.py)

# $(call run_tests,environment,arguments)
define run_tests
@$(1)/bin/python -c 'import torch, transformers as t; print(f"transformers {t.__version__}, torch {torch.__version__}")'
$(OFFLINE) OMP_NUM_THREADS=1 $(1)/bin/python $(PYTEST) $(2) $(ARGS)
endef

.PHONY: help demo test test-full test-oldest test-newest lint format typecheck clean

help:
	@echo "make demo         plain generate and ddtree=True side by side, on a small real model"
	@echo "make test         all tests but the long grids"
	@echo "make test-full    the long grids too"
	@echo "make test-oldest  equality and semantics on the oldest supported transformers"
	@echo "make test-newest  the same on the newest transformers that can be installed"
	@echo "make lint         linter and format check"
	@echo "make format       fix what the linter and the formatter can fix"
	@echo "make typecheck    mypy --strict"
	@echo "make clean        remove the environments, the caches and the builds"

demo: $(INSTALLED)
	@$(OFFLINE) $(PYTHON_IN_VENV) examples/demo.py $(ARGS)

test: $(INSTALLED)
	$(call run_tests,$(VENV))

test-full: $(INSTALLED)
	$(call run_tests,$(VENV),-m "" --timeout=3600)

test-oldest: $(OLDEST)/.installed
	$(call run_tests,$(OLDEST),$(VERSIONED))

# Upgraded each time, and by itself, so that pip looks beyond the versions that were tested and, one day, the range that
# pyproject.toml allows.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python $(PIP_INSTALL) --constraint $(NEWEST)/constraints.txt --upgrade transformers
	$(call run_tests,$(NEWEST),$(VERSIONED))

lint: $(INSTALLED)
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .

format: $(INSTALLED)
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

typecheck: $(INSTALLED)
	$(PYTHON_IN_VENV) -m mypy

# How each environment is pinned. pip takes no two pins of one package, so the oldest's replace the usual ones. For the
# newest only torch stays: another build of it may be gigabytes, and is not what is asked about.
$(INSTALLED): PINS := cat constraints.txt
$(OLDEST)/.installed: PINS := awk -F== 'NR == FNR { own[$$1]; print; next } !($$1 in own)' constraints-oldest.txt constraints.txt
$(NEWEST)/.installed: PINS := grep ^torch== constraints.txt
$(OLDEST)/.installed $(NEWEST)/.installed: EXTRA := test
$(INSTALLED): EXTRA := dev

# The stamp is written last, so that an interrupted installation is taken up again.
%/.installed: pyproject.toml constraints.txt constraints-oldest.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, \
	$(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=/path/to/a/newer/python")'
	@echo "Setting up $*: this takes a few minutes the first time."
	$(PYTHON) -m venv $*
	$(PINS) > $*/constraints.txt
	$*/bin/python $(PIP_INSTALL) --constraint $*/constraints.txt --editable '.[$(EXTRA)]'
	$*/bin/python $(PIP_INSTALL) --no-deps --requirement requirements-data.txt
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) .cache .mypy_cache .pytest_cache .ruff_cache build dist src/hf_ddtree.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

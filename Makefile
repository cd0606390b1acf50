# make train   set up if needed, fetch and prepare the default text, train, print samples
# make test    set up if needed, then lint, types and every test
#
# PYTHON=python3.12   which Python makes .venv          ARGS="seed=1"   more settings for train.py
# PYTEST_ARGS="-k rope"   more arguments for pytest     PIP_ARGS="..."  more arguments for pip

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: train test lint format clean

train: .venv/installed
	$(BIN)/python train.py $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "glassgpt needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (once; PyTorch is the large part)"
	$(PIP) -e '.[report]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev,interop,serve]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

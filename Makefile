# `make demo` and `make test` set up all that they need, from nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-slow lint types docs wheel benchmark clean

demo: $(VENV)/agents  ## train for minutes, draw the curve and an episode
	$(BIN)/python agents/ppo_adapool.py

test: $(VENV)/dev  ## run the tests
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/dev  ## run the learning checks, minutes
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/dev  ## ruff, and the agents' copies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_copies.py

types: $(VENV)/dev  ## mypy
	$(BIN)/mypy

# Without --quiet, which would hide warnings from --strict too.
docs: $(VENV)/docs  ## build the documentation: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Build the wheel, and test it from a folder and an environment that know nothing of the checkout.
wheel: $(VENV)/dev  ## build the wheel and test it from outside the checkout
	rm -rf dist build
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet dist/*.whl pytest
	cd build && wheel/bin/python -m pytest -q -p no:cacheprovider -c ../pyproject.toml --rootdir . ../tests/installed_wheel.py

benchmark: $(VENV)/dev  ## speed on this machine, beside the peers that are installed
	$(BIN)/python benchmarks/env_speed.py

help:  ## name the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' Makefile

clean:  ## remove .venv, dist and build
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/agents: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[agents]"
	touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/agents $(VENV)/docs

# `make demo` and `make test` set up all that they need, from nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint types wheel copies benchmark clean

demo: $(VENV)/agents
	$(BIN)/python agents/ppo_adapool.py

test: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_copies.py

types: $(VENV)/dev
	$(BIN)/mypy

# Build the wheel, and test it from a folder and an environment that know nothing of the checkout.
wheel: $(VENV)/dev
	rm -rf dist build
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet dist/*.whl pytest
	cd build && wheel/bin/python -m pytest -q -p no:cacheprovider -c ../pyproject.toml --rootdir . ../tests/installed_wheel.py

benchmark: $(VENV)/dev
	$(BIN)/python benchmarks/env_speed.py

clean:
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/agents: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[agents]"
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/agents

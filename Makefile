# `make demo` and `make test` set up all that they need, from nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# What has a GPU to run on, also where no package can be installed: PYTHON needs pytest, pytest-xdist and the extra [agents].
GPU_TESTS := $(addprefix tests/,nn interfaces/test_device_step.py interfaces/test_functional.py interfaces/test_padding.py \
	interfaces/test_vector_env.py supervised/test_supervised.py supervised/test_synthetic.py training/test_gpu.py)

.PHONY: help demo test test-process test-gpu test-slow test-lowest test-newest lint types types-platforms docs wheel lock audit benchmark results clean

demo: $(VENV)/agents  ## train for minutes, draw the curve and an episode
	$(BIN)/python agents/ppo_adapool.py

test: $(VENV)/dev  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not process"

test-process: $(VENV)/dev  ## run the tests that start programs and take seconds each
	$(BIN)/python -m pytest -m "process and not slow"

test-gpu:  ## run the tests that use a GPU, by PYTHON itself: no environment is made, nothing is installed
	$(PYTHON) -m pytest -n 8 --dist loadfile -m "not slow" $(GPU_TESTS)

test-slow: $(VENV)/dev  ## run the learning checks, minutes
	$(BIN)/python -m pytest -m slow

# Old releases call what newer ones of their own dependencies announce to remove: that is no error there.
test-lowest: $(BIN)/uv  ## run the tests with the lowest direct dependencies that pyproject.toml allows, in build/lowest
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest --resolution lowest-direct -e ".[dev]"
	build/lowest/bin/python -m pytest -n 2 -m "not slow" -W default::DeprecationWarning -W default::PendingDeprecationWarning

test-newest: $(BIN)/uv  ## run the tests with the newest dependencies that it allows, in build/newest
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) build/newest
	$(BIN)/uv pip install --quiet --python build/newest --upgrade -e ".[dev]"
	build/newest/bin/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/dev  ## ruff, and the agents' copies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_copies.py

types: $(VENV)/dev  ## mypy
	$(BIN)/mypy

types-platforms: $(VENV)/dev  ## mypy as on Windows and macOS, minutes
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

# Without --quiet, which would hide warnings from --strict too.
docs: $(VENV)/docs  ## build the documentation: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The sdist is the checkout, all of it and no more. Each is tested from a folder and an environment that know nothing of the checkout.
wheel: $(VENV)/dev  ## build sdist and wheel and test both from outside the checkout
	rm -rf dist build/wheel build/sdist
	mkdir -p build
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	git ls-files | sort > build/checkout.txt
	tar -tzf dist/*.tar.gz | sed 's,^[^/]*/,,' | grep -vx PKG-INFO | sort | diff build/checkout.txt -
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet dist/*.whl pytest
	cd build && wheel/bin/python -m pytest -q -p no:cacheprovider -c ../pyproject.toml --rootdir . ../tests/installed_wheel.py
	$(PYTHON) -m venv --clear build/sdist
	build/sdist/bin/python -m pip install --quiet dist/*.tar.gz pytest
	cd build && sdist/bin/python -m pytest -q -p no:cacheprovider -c ../pyproject.toml --rootdir . ../tests/installed_wheel.py

lock: $(BIN)/uv  ## renew requirements-dev.txt: exact versions and hashes of all that development needs
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--extra dev --custom-compile-command "make lock" --output-file requirements-dev.txt pyproject.toml

audit: $(BIN)/uv  ## look the locked versions up among the known vulnerabilities; needs a network
	$(BIN)/uv tool run pip-audit --strict --disable-pip --require-hashes --requirement requirements-dev.txt

results: $(VENV)/agents  ## make the figures and tables of docs/results.md from the runs in docs/data; needs no GPU
	$(BIN)/python tools/make_results.py

benchmark: $(VENV)/dev  ## speed on this machine, beside the peers that are installed
	$(BIN)/python benchmarks/env_speed.py

help:  ## name the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' Makefile

clean:  ## remove .venv, dist and build
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet uv

$(VENV)/agents: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[agents]"
	touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/agents $(VENV)/docs

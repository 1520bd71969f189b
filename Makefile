# What do I type? `make` builds .venv, `make help` lists the rest. `make test ARGS="tests/test_host.py -x"` passes arguments on.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that share the tests. Compiling keeps one core busy at a time, so two cores are worth two.
JOBS ?= 2

# The first Python that is new enough. Choose another with `make PYTHON=python3.13`.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# Downloads may be slow; they happen once, until pins or extras change.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 --timeout 180

.DEFAULT_GOAL := install
.PHONY: install demo test test-loaders check lint layout types format docs bench bench-env clean help

install: $(VENV)/.installed  ## build .venv with everything the tests and the docs use (default)

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "replicax needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable ".[dev,docs]"
	$(BIN)/python -m compileall -q src  # pip does so for what it copies
	touch $@

demo: install  ## train a small network on several replicas of this machine
	$(BIN)/replicax demo $(ARGS)

test: install  ## run the tests; slow ones with ARGS=--slow
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

check: lint layout types  ## lint, formatting and types

lint: install
	$(BIN)/ruff check .

layout: install
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

format: install  ## put the code into the form that `check` wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## build the site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install  ## measure steps, all-reduces and the import against hand-written JAX; others with ARGS="zero1 --rounds 9"
	$(BIN)/python -m benchmarks $(ARGS)

bench-env: .bench-venv/.installed  ## the environment with TensorFlow and torch, for benchmarks against them

.bench-venv/.installed: constraints-bench.txt
	@test -n "$(PYTHON)" || { echo "the benchmarks need Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .bench-venv
	$(subst $(BIN),.bench-venv/bin,$(INSTALL)) --constraint constraints-bench.txt torch tensorflow-cpu numpy
	touch $@

test-loaders: .loaders-venv/.installed  ## the tests of data sources with the real TensorFlow and torch
	.loaders-venv/bin/python -m pytest tests/test_sources.py $(ARGS)

.loaders-venv/.installed: constraints-bench.txt
	$(PYTHON) -m venv .loaders-venv
	$(subst $(BIN),.loaders-venv/bin,$(INSTALL)) --constraint constraints-bench.txt torch tensorflow-cpu \
		--editable ".[grain]" pytest pytest-timeout hypothesis
	touch $@

clean:  ## remove what the other targets made
	rm -rf $(VENV) .bench-venv .loaders-venv site build dist .pytest_cache .ruff_cache

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

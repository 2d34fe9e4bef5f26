# make train   installs into .venv and trains the nano preset on built-in data
# make test    installs and runs the tests
# make check   format, lint, types, tests: what CI runs
# make wheel   builds sdist and wheel into dist/ and checks their metadata
# make devices   measures this machine and writes its section of docs/devices.md (a quarter of an hour)
# make fmt     formats and mends what ruff can;  make clean removes .venv and caches (runs/ is kept)
# Flags go in ARGS:  make train ARGS="--epochs 2"

BIN := .venv/bin
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# uv installs in seconds what takes pip minutes; where it is missing, pip fetches it into .venv first.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv)
install = uv=$(or $(UV),$(BIN)/uv); if $$uv --version >/dev/null 2>&1; \
	then $$uv pip install --quiet --python $(BIN)/python $(1); else $(BIN)/python -m pip install --quiet $(1); fi

.PHONY: train test check fmt clean devices wheel
.DELETE_ON_ERROR:

train: .venv/installed
	$(BIN)/m1clip train $(ARGS)

# Two processes: many tests wait for others that they start. A file's tests stay together.
test: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: .venv/installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

# Without build isolation: hatchling is one of the development tools, so nothing is downloaded.
wheel: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

devices: .venv/installed
	$(BIN)/python benchmarks/devices.py $(ARGS)

fmt: .venv/installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@[ -n "$(PYTHON)$(UV)" ] || { echo "m1clip needs Python 3.11 or newer, and found none (on a Mac: brew install python)"; exit 1; }
	$(if $(UV),uv venv --quiet --python $(or $(PYTHON),'>=3.11') .venv,$(PYTHON) -m venv .venv)
	$(if $(UV),,-$(BIN)/python -m pip install --quiet uv)

.venv/installed: pyproject.toml | .venv/bin/python
	@echo 'installing m1clip into .venv (torch is large: the first time takes a minute or two)'
	@$(call install,--editable .)
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	@echo 'installing m1clip and its development tools into .venv'
	@$(call install,--editable '.[dev]')
	@touch $@ .venv/installed

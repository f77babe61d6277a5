# `make` lists what there is. Everything is installed into .venv from the package index that pip is set up for.

VENV   := .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := $(VENV)/bin
OUT    ?= demo-out
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean

help: ## what there is
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt -e .

# The base alone: replay, live and demo need no more.
$(VENV)/base.stamp: pyproject.toml constraints.txt $(VENV)/pip.stamp
	$(INSTALL)
	$(BIN)/prefetcher compile
	@touch $@

# Everything at once, the base with it; kernels are compiled here, once, and not by each worker of the tests.
$(VENV)/dev.stamp: pyproject.toml constraints.txt $(VENV)/pip.stamp
	$(INSTALL) --group dev
	$(BIN)/prefetcher compile
	@touch $(VENV)/base.stamp $@

setup: $(VENV)/dev.stamp ## everything that developing needs, in .venv

demo: $(VENV)/base.stamp ## two days of traffic on real weights, with and without prefetching: under 4 minutes
	$(BIN)/prefetcher demo --out $(OUT) $(ARGS)

test: setup ## all tests, a file at a time on each of two workers: make test ARGS="-n 0 -k ledger" for some
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/base.stamp ## a benchmark: make bench NAME=load JSON=load.json [ARGS="…"]
	@test -n "$(NAME)" || { echo 'name one: make bench NAME=load|replay|policies|ingest|hint|… JSON=file.json [ARGS="…"]'; exit 2; }
	$(BIN)/prefetcher bench $(NAME) $(if $(JSON),--json $(JSON)) $(ARGS)

clean: ## removes what was built, not .venv
	rm -rf $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find prefetcher models connectors tests -name __pycache__ -type d -prune -exec rm -rf {} +

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

run: .venv/run-installed  ## train the tiny benchmark on this machine and show the verdict
	$(BIN)/python -m bench.launch task=lora_tiny cluster=local

test: .venv/test-installed  ## all tests, real training runs included
	$(BIN)/python -m pytest

lint: .venv/test-installed  ## style, types, who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[engine]'
	touch $@

.venv/test-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[engine,dev]'
	touch $@ .venv/run-installed

.PHONY: run test lint

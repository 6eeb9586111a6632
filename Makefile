PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
LOGS ?= $(wildcard ../shared/mlperf_logs)

run: .venv/run-installed  ## train the tiny benchmark on this machine and show the result
	@$(BIN)/runstop demo

test: .venv/test-installed  ## all tests: real training runs, a real Slurm, the official checkers
	tests/all.sh $(BIN)/python

fast: .venv/test-installed  ## tests that do not train, start no programs and are short, on all cores
	tests/all.sh $(BIN)/python fast

faults: grade-why  ## inject every known fault into runs on Slurm, Kubernetes, Ray, on hosts and by the runner
	$(BIN)/python tests/backends/slurm/faults.py
	$(BIN)/python -m pytest -q -m faults -n 2 --dist loadfile tests/launch tests/driver tests/backends --ignore=tests/backends/slurm

slow: .venv/test-installed .venv/site-installed  ## the longest tests, which make test leaves out
	$(BIN)/python -m pytest -m slow

find-slow: .venv/test-installed  ## does the node check name the slow part of 1,000 simulated clusters? SEED: to repeat a run
	$(BIN)/python experiments/find_slow.py $(if $(SEED),--seed $(SEED))

grade-why: .venv/test-installed  ## precision and recall of `why` on 200 composed logs; SEED: to repeat a run
	$(BIN)/python experiments/grade_why.py $(if $(SEED),--seed $(SEED))

mutants: .venv/test-installed  ## how many of a random sample of small defects the tests without training find
	$(BIN)/python experiments/mutants.py

packages:  ## Debian packages that some tests need (as root); the Slurm tests install their own
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends shellcheck squashfs-tools chromium chromium-driver openssh-client \
	  openssh-server podman runc

lint: .venv/test-installed  ## style, types, who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/words/check.py

site: .venv/site-installed  ## the documentation site, in build/site; a broken link is an error
	$(BIN)/mkdocs build --strict

bench: .venv/test-installed  ## speed of reading compared with MLPerf's tool, and the score of forecasts; LOGS: a folder of published logs
	$(BIN)/python experiments/reading.py $(LOGS)
	$(if $(LOGS),$(BIN)/python experiments/forecast.py $(LOGS),@echo "forecasts are scored on published logs: make bench LOGS=DIR")

predict: .venv/base-installed  ## predict every published step that is shipped, and print the errors
	$(BIN)/python experiments/predict.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("runstop needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/base-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/run-installed: pyproject.toml | .venv/bin/python
	@echo "installing runstop, torch and megatron-core into .venv: about 2.9 GB to download, once"
	$(BIN)/python -m pip install --progress-bar on --editable '.[engine,data]'
	touch $@ .venv/base-installed

.venv/test-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[engine,dev]'
	touch $@ .venv/run-installed .venv/base-installed

.venv/site-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

.PHONY: run test fast faults slow find-slow grade-why mutants bench predict lint packages site

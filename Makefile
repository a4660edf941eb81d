# Every target sets up what it needs in .venv, once, and again when the requirements change.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test lint types unit soak format clean

train: .venv/train.done ## the main job: a language model, from data to report
	$(BIN)/wholebatch train --overwrite

test: lint types unit ## everything that has to hold

lint: .venv/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/dev.done
	$(BIN)/mypy

# One thread each, as two workers share the machine's cores.
unit: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --cov --cov-report term --quiet

soak: .venv/dev.done ## kill a run fifty times and resume it; its weights must not notice
	OMP_NUM_THREADS=1 PYTHONPATH=tests/pretrain $(BIN)/python tests/pretrain/kills.py 50

format: .venv/dev.done
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv

.venv/train.done: pyproject.toml constraints.txt | .venv
	$(INSTALL) --editable ".[torch,cli]"
	touch $@

.venv/dev.done: pyproject.toml constraints.txt | .venv
	$(INSTALL) --editable ".[dev]"
	touch $@ .venv/train.done

.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wholebatch needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

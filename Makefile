# make generate   set up and write a text with the embedded model
# make test       set up and run the whole test suite
# make lint       ruff and mypy
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: generate test lint clean

generate: $(STAMP)
	$(BIN)/python -m minimoe generate --router elbow

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and pinned: resolved on its own it is the small CPU build where an index offers one, and
# nothing that is installed after it may replace it.
$(STAMP): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info

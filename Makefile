# make generate   set up and write a text with the embedded model
# make test       set up and run the whole test suite
# make lint       ruff and mypy
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN    := $(VENV)/.run
DEV    := $(VENV)/.dev
INPUTS := pyproject.toml .ci/constraints.txt $(wildcard minimoe/native/*.cpp minimoe/native/*.h minimoe/native/*.inl)

.PHONY: generate test lint clean

generate: $(RUN)
	$(BIN)/python -m minimoe generate --router elbow

test: $(DEV)
	$(BIN)/python -m pytest

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and pinned: resolved on its own it is the small CPU build where an index offers one, and
# nothing that is installed after it may replace it.
$(RUN): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit("minimoe needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else 0'
	@echo "Setting up $(VENV); torch is about 1 GB, so this takes a few minutes the first time." >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c .ci/constraints.txt torch
	$(PIP) install -c .ci/constraints.txt -e .
	touch $(RUN)

$(DEV): $(RUN)
	@echo "Installing what the tests and checks need." >&2
	$(PIP) install -c .ci/constraints.txt -e '.[dev]'
	touch $(DEV)

clean:
	rm -rf $(VENV) build *.egg-info

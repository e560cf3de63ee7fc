# make generate   set up and write a text with the embedded model
# make test       set up and run the whole test suite
# make lint       ruff and mypy
# make test-kernels  the native kernels alone against plain loops (g++)
# make test-asan  the native kernels' tests under AddressSanitizer (g++)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN    := $(VENV)/.run
DEV    := $(VENV)/.dev
INPUTS := pyproject.toml .ci/constraints.txt $(wildcard minimoe/native/*.cpp minimoe/native/*.h minimoe/native/*.inl)

.PHONY: generate test test-kernels test-asan lint clean

generate: $(RUN)
	$(BIN)/python -m minimoe generate --router elbow

# Two processes, each with whole files, so that what a file prepares is prepared once.
test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The native kernels without Python: every instruction set that this processor has against plain loops (g++).
KERNELS := interface decode prefix scalar avx2 avx512 avx512bf16 amx
test-kernels:
	mkdir -p build
	g++ -std=gnu++17 -O3 -fopenmp -fno-math-errno $(KERNELS:%=minimoe/native/%.cpp) tests/kernels.cpp -o build/kernels
	build/kernels

# A copy of the package whose kernels are compiled with AddressSanitizer: reading or writing one byte outside a tensor
# ends the run (-s: its report is not kept back). Leaks at exit are not what is looked for.
ASAN := build/asan
test-asan: $(DEV)
	rm -rf $(ASAN) && mkdir -p $(ASAN)
	cp -r minimoe tests weights pyproject.toml $(ASAN)
	rm -f $(ASAN)/minimoe/native/_kernels*
	for name in $(KERNELS); do \
	    g++ -std=gnu++17 -O1 -g -fopenmp -fno-math-errno -fsanitize=address -fno-omit-frame-pointer -fPIC -c \
	        $(ASAN)/minimoe/native/$$name.cpp -o $(ASAN)/$$name.o || exit 1; \
	done
	g++ -shared -fsanitize=address $(ASAN)/*.o -o $(ASAN)/minimoe/native/_kernels.so
	cd $(ASAN) && LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	    ../../$(BIN)/python -m pytest -s tests/test_native*.py tests/test_experts.py

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

# make train: the main job.  make test: the tests.  Both set everything up in .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers, one thread each, on the two cores that continuous integration has.
WORKERS ?= 2

SOURCES := $(shell find csrc -type f) setup.py pyproject.toml requirements-dev.txt tools/bootstrap.py tools/native.py
CPP := $(shell find csrc -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")

# The triton beside torch 2.11, the oldest torch supported, in an environment of its own.
OLD_TRITON := 3.6
OLD_VENV := $(VENV)-triton-$(OLD_TRITON)

.PHONY: setup train test lint format sanitize slow bench fit-big docs clean triton-$(OLD_TRITON)

setup: $(VENV)/.ready

$(VENV)/.ready: $(SOURCES)
	$(PYTHON) tools/bootstrap.py --venv $(VENV)
	@touch $@

train: setup
	$(BIN)/python examples/train_fsdp.py --compare --world-size 2

test: setup
	@$(BIN)/python -c "import xdist" 2>/dev/null && workers="-n $(WORKERS)" || workers=""; set -x; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $$workers -m "not slow" tests

# Exhaustive casts (2^32 values), tensors past 2^31 elements, and the longer distributed tests on two hosts.
slow: setup
	$(BIN)/python -m pytest -m slow tests

$(OLD_VENV)/.ready: requirements-dev.txt tools/bootstrap.py Makefile
	$(PYTHON) tools/bootstrap.py --venv $(OLD_VENV) --only torch triton numpy pytest \
		--override "triton==$(OLD_TRITON).0" "numpy<2.4"
	@touch $@

# The Triton kernels' tests with it: interpreted, and compiled ahead of time. It wants numpy < 2.4.
triton-$(OLD_TRITON): setup $(OLD_VENV)/.ready
	$(OLD_VENV)/bin/python -c "import triton; print('triton', triton.__version__)"
	OMP_NUM_THREADS=1 $(OLD_VENV)/bin/python -m pytest tests/test_triton.py \
		tests/test_triton_code.py tests/test_gpu_code.py tests/test_sass.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The C++ kernels' tests against a build with AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: setup
	$(BIN)/python tools/sanitize.py

# 1.9 billion parameters in less than 15 GB of memory, where stock AdamW needs 30.
fit-big: setup
	$(BIN)/python examples/fit_big.py --params 1.9B --sequence 128 --memory-cap 15GB --json runs/fit_big/1.9B.json

bench: setup
	$(BIN)/python -m pytest benchmarks -s

# The pages and the API reference, in docs/_build; a broken reference is an error.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

clean:
	rm -rf build dist docs/_build *.egg-info shardops/*.so .pytest_cache .mypy_cache .ruff_cache runs

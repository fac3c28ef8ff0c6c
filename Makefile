# `make quickstart` and `make test` set everything up on first use. Nothing else is needed.

.PHONY: quickstart test test-slurm soak suites check slurm browser lock clean

# A uv that answers, else a private one (a version manager's stub may exist and fail).
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

quickstart: .venv/ready
	$(BIN)/mixtron quickstart

# Two processes share the tests: one works while the other's ranks wait for each other.
test: .venv/ready
	$(PYTEST) -n 2 --dist worksteal -m "not soak and not cluster" $(ARGS)
	@echo "NOT TESTED HERE: jobs under a real SLURM (\`make slurm test-slurm\`, as root on Debian)"

# The tests that start a real SLURM, in minutes; they need root, and `make slurm` once.
test-slurm: .venv/ready
	$(PYTEST) -m cluster tests/slurm $(ARGS)

soak: .venv/ready
	$(PYTEST) -m soak $(ARGS)

# The papers' synthetic tasks on a CPU, in minutes each: make suites [SUITES=configs/suites/kla.yaml]
SUITES := $(wildcard configs/suites/*.yaml)
suites: .venv/ready
	code=0; for suite in $(SUITES); do $(BIN)/mixtron eval synthetic suite $$suite --tiny || code=$$?; done; exit $$code

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .typing/mixtron
	for root in megatron_ext kernels data_prep launch slurm; do ln -sfn ../../$$root .typing/mixtron/$$root; done
	$(BIN)/pyright

# The real SLURM that tests/slurm starts, and shellcheck: Debian's packages, which only root installs.
slurm:
	@[ "$$(id -u)" = 0 ] || { echo "make slurm: needs root"; exit 1; }
	@PATH=$$PATH:/usr/sbin; \
	if ! { command -v slurmctld && command -v munged && command -v shellcheck; } >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends slurm-wlm munge shellcheck >/dev/null; \
	fi

# The browser that a test opens a report's page with: Debian's package, which only root installs.
browser:
	@if ! command -v chromium >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi

# Pins every dependency with its hashes; commit requirements.lock.
lock: $(if $(filter uv,$(UV)),,.tools/bin/uv)
	$(UV) lock --upgrade
	$(UV) export -q --all-groups --extra quickstart --extra fast --extra eval --no-emit-project --no-annotate --no-header -o requirements.lock

.venv/ready: requirements.lock pyproject.toml setup.py $(if $(filter uv,$(UV)),,.tools/bin/uv)
	$(UV) venv -q --allow-existing --python "$$(cat .python-version)" .venv
	$(UV) pip sync -q --require-hashes requirements.lock
	$(UV) pip install -q --no-deps -e .
	touch $@

.tools/bin/uv:
	python3 -m venv .tools || PYENV_VERSION=system python3 -m venv .tools
	.tools/bin/python -m pip install -q uv

clean:
	rm -rf .venv .tools runs

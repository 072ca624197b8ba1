# Each target alone does all its set-up on a fresh Debian, Ubuntu or macOS with Python 3.11+ and make.
#   make serve ARGS="--port 9000"          options for the server
#   make test PYTHON=python3.12 VENV=.venv312

VENV ?= .venv
# The first of these that is new enough; `PYTHON=...` overrides.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
# The release this project is tested with is tried first; pyproject.toml has the range that is allowed.
TORCH ?= torch==2.13.0
ARGS ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
FETCHED := $(VENV)/.fetched

.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-fast lint format matrix sanitize soak fuzz-api bench peers site chapters traces relock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "minivllm needs Python 3.11 or newer, and found none." \
		"Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.12)" \
		"or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "minivllm needs Python 3.11 or newer; $(PYTHON) is older or does not run."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make a virtual environment: its venv module is a package of its own here." \
		"Debian, Ubuntu: apt install python3-venv"; exit 1; }
	@$(PY) -c '' 2>/dev/null || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@if [ "$$(uname -s)" = Linux ] && ! [ -e /dev/nvidiactl ]; then \
		echo "no NVIDIA GPU here: if pip starts to download nvidia-* packages, see 'A CPU build of torch' in README.md"; fi
	$(PY) -m pip install "$(TORCH)" || echo "no $(TORCH) for this machine: taking what pyproject.toml allows"
	$(PY) -m pip install -e ".[dev]"
	@touch $@

$(FETCHED): $(INSTALLED)
	$(PY) -c "from minivllm.config import DEFAULT_MODEL; from minivllm.loading import resolve; resolve(DEFAULT_MODEL)"
	@touch $@

setup: $(INSTALLED) $(FETCHED)  ## .venv, the packages and the default model

serve: setup  ## the OpenAI-compatible server (ARGS="--port 9000")
	$(PY) -m minivllm.serve $(ARGS)

chat: setup  ## chat in this terminal
	$(PY) -m minivllm chat $(ARGS)

lint: $(INSTALLED)  ## ruff, without changing a file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(INSTALLED)  ## ruff, changing files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Tests look at results, not at speed: threads that wait asleep leave the cores to the servers under test.
test: setup lint  ## everything that CI checks (ARGS="-k prefix")
	OMP_WAIT_POLICY=passive $(PY) -m pytest $(ARGS)

test-fast: $(INSTALLED)  ## the control plane alone: no torch, no model, seconds
	$(PY) -m pytest -q -m "not model and not slow" tests/scheduler tests/kv tests/fuzz $(ARGS)

matrix: setup  ## run the conformance tests and write what `features --matrix` prints
	$(PY) -m pytest -q tests/conformance --matrix minivllm/matrix.json

# No OpenMP: its runtime is not instrumented. The last two take the paths of other machines.
CHECK := -std=c++20 -O1 -g -w -pthread
CHECKS := attention packed_linear dense_linear lora mask decoder
# The decoder calls the others through pointers.
ALSO_decoder := kernels/cpu/packed_linear.cpp kernels/cpu/dense_linear.cpp kernels/cpu/attention.cpp
CPU := $(shell uname -m)
OTHERS := $(if $(filter x86_64,$(CPU)),"-march=x86-64" "-mavx2 -mfma -mf16c")
sanitize:  ## the C++ kernels under ASan, UBSan and TSan (ARGS="500": that many random batches)
	@mkdir -p build/sanitize
	@for flags in "-march=native -fsanitize=address,undefined -fno-sanitize-recover=all" \
			"-march=native -fsanitize=thread" $(OTHERS); do \
		echo "$$flags"; \
		$(foreach check,$(CHECKS),$(CXX) $(CHECK) $$flags tests/sanitize/$(check).cpp $(ALSO_$(check)) -o build/sanitize/$(check) \
			&& build/sanitize/$(check) $(or $(ARGS),100) || exit 1;) \
	done

# Ten minutes unless ARGS say otherwise; prints a table.
soak: $(INSTALLED)  ## fail if a server's memory, files, tasks or blocks grow under load (ARGS="--seconds 60")
	PYTHONPATH=tests $(PY) -m fire.soak $(ARGS)

fuzz-api: $(INSTALLED)  ## whatever /openapi.json allows and forbids, at a server (ARGS="--max-examples 2000")
	PYTHONPATH=tests $(PY) -m fire.fuzz_api $(ARGS)

bench: setup  ## start-up, host time and offline throughput, one JSON line each
	$(PY) bench/startup.py $(ARGS)
	$(PY) bench/host.py $(ARGS)
	$(PY) bench/offline.py $(ARGS)

# Each peer has a virtual environment of its own in .peers/. One that cannot be installed is left out, with the reason.
peers: setup  ## vLLM, llama.cpp and transformers beside minivllm (ARGS="--only vllm"); then: python -m bench.peers
	$(PY) -m bench.peers.install $(ARGS)

site: $(INSTALLED)  ## the book as HTML, in build/site: open build/site/index.html
	$(PY) -m sphinx -n -W --keep-going -q -c site chapters build/site

chapters: setup traces  ## run every chapter's script and keep its results, which the book then shows
	$(PY) -m minivllm chapter --all --record

traces: setup  ## record the runs that the book's widgets replay
	$(PY) -m chapters.record_traces $(ARGS)

relock: $(INSTALLED)  ## renew the locks of the book's quotes, after reading the text around those that changed
	$(PY) site/relock.py

clean:  ## forget .venv and all caches in this folder
	rm -rf $(VENV) .peers build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

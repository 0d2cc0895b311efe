# Everything sets itself up: a virtual environment in .venv with the pinned requirements.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-examples test-docs check docs docs-serve pages bench bench-command bench-first bench-networks bench-search bench-whitening bench-peers bench-profile bench-gpu bench-growth bench-asynchronous bench-metrics bench-privacy bench-stream clean

demo: .venv/.run  ## FOLB, FedProx and FedAvg on Synthetic_1_1: a table, and the curves in demo/curves.png
	$(BIN)/folb compare synthetic_1_1 --algorithms folb,fedprox,fedavg --set rule.weights=equal,samples \
	  --rounds 200 --seeds 5 --target 0.7 --out demo --again

test: .venv/.test  ## the tests
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder  # one of them waits for Flower's processes

# they compute more than they compile: with XLA's usual optimization, which the other tests do without
OPTIMIZED := XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true"

test-slow: .venv/.test  ## the tests that take minutes
	$(OPTIMIZED) $(BIN)/python -m pytest -m slow

test-examples: .venv/.examples  ## the Flower examples, in Flower's simulation and on SuperNodes; the whole demo
	$(BIN)/python -m pytest -m slow tests/test_deployment.py

test-docs: .venv/.docs  ## the site, the notebook, and every command of the documents, typed in a fresh clone
	$(BIN)/python -m pytest -m slow tests/test_site.py
	$(BIN)/python scripts/type_the_docs.py

check: .venv/.test  ## format, lint and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/.docs  ## the site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/.docs  ## the site at 127.0.0.1:8000, made again when a file changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

RESULTS := studies/results
pages: .venv/.studies  ## the pages of the studies in docs/, from the results in studies/results; nothing is run
	$(BIN)/folb arena --pages-only --results $(RESULTS)/arena.jsonl.gz --out docs/arena
	$(BIN)/folb defend --pages-only --results $(RESULTS)/defence.jsonl.gz --out docs/attacks
	$(BIN)/folb reproduce all outside --pages-only --results $(RESULTS)/reproduction.jsonl.gz --out docs/reproduction

bench: .venv/.bench  ## speed against plain device loops, in one run
	$(BIN)/python benchmarks/speed.py

bench-command: .venv/.run  ## where the time of a warm `folb compare` goes
	$(BIN)/python benchmarks/command.py

bench-first: .venv/.run  ## how soon `folb compare NAME` shows its first point, for every dataset
	$(BIN)/python benchmarks/first_point.py

bench-networks: .venv/.bench  ## the networks' speed against a plain PyTorch loop, by CPU time
	$(BIN)/python benchmarks/networks.py

bench-whitening: .venv/.run  ## a whitened round, and orthogonal local steps, against plain ones, by CPU time
	$(BIN)/python benchmarks/whitening.py

bench-search: .venv/.run  ## the search as one program against its points one by one
	$(BIN)/python benchmarks/search.py

bench-growth: .venv/.run  ## how the cost of a round grows with devices, choices, parameters and runs
	$(BIN)/python benchmarks/growth.py

bench-asynchronous: .venv/.run  ## rounds that do not wait against rounds that do, with the same device work
	$(BIN)/python benchmarks/asynchronous.py

bench-metrics: .venv/.run  ## what metrics beside the accuracy cost, if every round is evaluated
	$(BIN)/python benchmarks/metrics.py

bench-privacy: .venv/.test  ## private rounds against plain ones, with the same device work
	$(BIN)/python benchmarks/privacy.py cost

bench-stream: .venv/.run  ## the same run with its samples on the accelerator, and streamed from the host
	$(BIN)/python benchmarks/stream.py

bench-peers: .venv/.run  ## the same work on FedJAX, pfl, Flower, FedLab and a PyTorch loop, each in its own environment
	$(BIN)/python benchmarks/peers/run.py

bench-profile: .venv/.run  ## where the time of a round goes, from a profile, on the peers' works
	$(BIN)/python benchmarks/peers/profile_folb.py

bench-gpu: .venv/.run  ## on a GPU: FedJAX on the same work, and a large search (install jax[cuda13] and FedJAX in .venv first)
	$(BIN)/python benchmarks/peers/run.py --gpu
	$(BIN)/python benchmarks/search.py --epochs --out docs/benchmarks/search-gpu.json

clean:
	rm -rf .venv .venv-peers demo site build src/*.egg-info studies/build studies/src/*.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "folb needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.run: requirements.txt pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

.venv/.studies: studies/pyproject.toml .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable ./studies
	@touch $@

.venv/.test: requirements-test.txt .venv/.studies
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

.venv/.docs: requirements-docs.txt .venv/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

.venv/.examples: .venv/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.41.0' torch==2.13.0
	@touch $@

.venv/.bench: .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

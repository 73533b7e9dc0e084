# Everything sets itself up: only Python 3.11+, pip and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long test-oldest lint unit docs bench bench-gpu reproduce-small clean

# One thread: a second gains little at this size and loses much on a busy machine.
demo: $(VENV)/.ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/leakwatch fit --config leakwatch:quickstart

test: lint docs unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Into build/site. A link that leads nowhere, or a page that nothing leads to, is an error.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# One thread in each process, see above; a process needs about 2 GiB.
unit: $(VENV)/.ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=worksteal

# Under 40 minutes: what make test takes a sample of.
test-long: $(VENV)/.ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -m long -n auto --maxprocesses=4 --dist=worksteal

# The oldest versions that pyproject.toml declares, in an environment of its own: of
# each "name>=1.2" the last 1.2.x, of "name>=1.2.3" that one.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		$$(.venv-oldest/bin/python tests/oldest.py pyproject.toml)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv-oldest/bin/python -m pytest -n auto --maxprocesses=4 --dist=worksteal

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/spectrum.py
	$(BIN)/python benchmarks/monitor.py

# Under 8 minutes; needs a CUDA device.
bench-gpu: $(VENV)/.ready
	$(BIN)/python benchmarks/gpu.py

# Every table and figure at small scale, hours on two cores; goes on where it was killed.
# DATA is the folder with MNIST/raw, cifar-10-batches-py and so on.
DATA ?= data
reproduce-small: $(VENV)/.ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/leakwatch reproduce all --jobs 2 --data-dir $(DATA) --output build/reproduction

# One environment for both, made again only when the dependencies change.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("leakwatch needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info runs leakwatch-attack \
		leakwatch-audit leakwatch-compare-inits leakwatch-reproduction leakwatch-run* leakwatch-trade-off

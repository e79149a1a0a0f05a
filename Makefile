# Everything that a fresh machine needs is made by these targets: "make demo" and "make test".
#
#   PYTHON=/path/to/python3.11   the Python to make the environments with (3.10 to 3.13; TensorFlow Privacy
#                                needs 3.10 or 3.11). It is used when an environment is made; "make distclean"
#                                first to change it.
#   PIP_ARGS='...'               more options for pip, an --extra-index-url with PyTorch's CPU builds for example
#   PYTEST_ARGS='...'            more options for pytest: --seed N, the one of a run that is repeated
#   WORKERS=2                    test processes
#   UTILITY_ARGS='--sets digits cancer'  options of the benchmark of "make utility"
#   GPU_PYTHON=python3           the Python of "make gpu", on a machine that has torch with CUDA already
#   RELEASE_ARGS='--url URL'     where the repository is published: links of the description become absolute
#   N=1000 LAW_ARGS='--against REVISION'  runs of "make law", and the commit that they stand beside (the newest tag)
#   DEEP_EXAMPLES=18             how many times the examples of "make test" that "make test-deep" searches

ifeq ($(origin PYTHON), undefined)
PYTHON := $(or $(shell for python in python3.11 python3.12 python3.10 python3.13 python3; do \
    $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
    && echo $$python && break; done), python3)
endif
WORKERS ?= 2
DEEP_EXAMPLES ?= 18
N ?= 1000
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
SOURCES := $(wildcard hidden_state_accountants adapters tests examples benchmarks tools)
CORE_TESTS := $(wildcard $(addprefix tests/, core laws theorems oracles opacus misuse/test_opacus.py sklearn))
# What answers in seconds. Left out: random searches (oracles, laws), TensorFlow's graphs (keras), processes and pages.
FAST_TESTS := $(wildcard $(addprefix tests/, core theorems misuse/test_opacus.py opacus/test_engine.py sklearn mutation))
# Those that need neither TensorFlow Privacy nor its optimizers.
KERAS3_TESTS := $(wildcard $(addprefix tests/keras/, test_keras3.py test_mirrored.py test_model.py test_model_*.py test_private_run.py))
INSTALL_INPUTS := pyproject.toml constraints.txt constraints-numpy2.txt
# A process that is done takes over tests of another one: TensorFlow's graphs are mostly made in one of them.
PYTEST = PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal

DEMO_REQUIREMENTS := -e '.[opacus,examples]'
TEST_REQUIREMENTS := -e '.[all,dev]'
PYTHON_VENV := .venv-$(notdir $(PYTHON))
DOCS_REQUIREMENTS := -e '.[docs]'
KERAS3_REQUIREMENTS := -e '.[keras2,keras3,dev]'
NUMPY2_REQUIREMENTS := -e '.[cli,opacus,dev]' scikit-learn

# An environment whose Python is gone (upgraded, moved) is not an installed one.
$(shell for venv in .venv .venv-numpy2 .venv-keras3 .venv-docs; do \
    $$venv/bin/python -c '' 2>/dev/null || rm -f $$venv/.*-installed; done)

# $(call install,ENVIRONMENT,CONSTRAINTS,REQUIREMENTS)
define install
@'$(PYTHON)' -c '' >/dev/null 2>&1 || { \
    echo "$(PYTHON) does not run. Install Python 3.10 to 3.13, or name one: make PYTHON=/path/to/python3.11" >&2; \
    exit 1; }; \
'$(PYTHON)' tools/environment.py '$(PYTHON)' $(1) $(2) $(PIP_ARGS) $(3)
endef

.PHONY: help demo test test-once test-all test-exhaustive test-fast test-numpy2 test-keras3 test-python test-mutations law rehearsal tightness benchmarks utility papers gpu \
    gpu-wheels docs release lint format clean distclean
.NOTPARALLEL:

help:
	@echo "make demo         train with Opacus, every iterate counted or the last one: epsilon and accuracy"
	@echo "make test         everything that CI runs: lint, then every behaviour once"
	@echo "make test-all     every case: whole products, all seeds; then rehearsal, test-numpy2 and test-keras3 (nightly)"
	@echo "make test-fast    the core, the theorems, and what loops may do with the engine of Opacus; a minute or two"
	@echo "make test-numpy2  the core's and the Opacus adapter's quick tests with dp-accounting 0.6 and numpy 2"
	@echo "make test-keras3  the Keras model that owns its run with the newest TensorFlow: with Keras 3, then with Keras 2"
	@echo "make test-python  the same with PYTHON=python3.12, or 3.10 or 3.13, in an environment of its own"
	@echo "make test-mutations  put one mistake at a time into the engine: the test of each must notice it (two hours on two cores)"
	@echo "make law          epsilon of N random runs beside that of the last release: the worst ratios"
	@echo "make rehearsal    every path of the Opacus adapter on a pretend device, which c++ builds, or on DEVICE=cuda"
	@echo "make tightness    write benchmarks/results/tightness.md: the bounds against exact values"
	@echo "make benchmarks   write benchmarks/results/speed.md: steps of the Opacus optimizers against Opacus'"
	@echo "make gpu          tests that need a CUDA device; writes benchmarks/results/steps_cuda.md. Needs torch, no network"
	@echo "make gpu-wheels   what make gpu needs beside torch, into wheels/, to be carried to a machine without network"
	@echo "make utility      write benchmarks/results/accuracy.md: the estimators beside tuned peers (half an hour; it can be stopped)"
	@echo "make papers       write the figures of the five papers into their pages, beside what is proved (a few minutes)"
	@echo "make test-deep    about an hour of adversarial search for runs that refute a bound (not part of make test)"
	@echo "make docs         build the site into site/, strictly, and the notebooks that it shows; open site/index.html"
	@echo "make release      build the source distribution and the wheel into dist/, reproducibly, and check them"
	@echo "make lint         ruff, mypy, the import directions and the beginnings of docstrings"
	@echo "make format       let ruff format and fix the sources"
	@echo "make clean        remove caches and builds"
	@echo "make distclean    remove the environments .venv and .venv-* too"
	@echo "Options: PYTHON=python3.11 PIP_ARGS='...' PYTEST_ARGS='...' WORKERS=2 DEEP_EXAMPLES=18"

demo: .venv/.demo-installed
	.venv/bin/python examples/linear_probe_opacus.py

test: lint test-once

test-once: .venv/.test-installed
	$(call PYTEST,.venv) $(PYTEST_ARGS) tests

test-all: test-exhaustive rehearsal test-numpy2 test-keras3

test-exhaustive: .venv/.test-installed
	$(call PYTEST,.venv) --exhaustive $(PYTEST_ARGS) tests

test-fast: .venv/.test-installed
	$(call PYTEST,.venv) -m "not slow" $(PYTEST_ARGS) $(FAST_TESTS)

test-numpy2: .venv-numpy2/.test-installed
	$(call PYTEST,.venv-numpy2) -m "not slow" $(PYTEST_ARGS) $(CORE_TESTS)

test-keras3: .venv-keras3/.test-installed
	TF_USE_LEGACY_KERAS=0 $(call PYTEST,.venv-keras3) $(PYTEST_ARGS) $(KERAS3_TESTS)
	TF_USE_LEGACY_KERAS=1 $(call PYTEST,.venv-keras3) $(PYTEST_ARGS) $(KERAS3_TESTS)

test-python: $(PYTHON_VENV)/.test-installed
	$(call PYTEST,$(PYTHON_VENV)) -m "not slow" $(PYTEST_ARGS) $(CORE_TESTS)

test-mutations: .venv/.test-installed
	.venv/bin/python tests/mutation/check_mutations.py --workers $(WORKERS)

law: .venv/.test-installed
	PYTHONPATH=. .venv/bin/python tests/laws/beside.py --runs $(N) $(LAW_ARGS)

rehearsal: .venv/.test-installed
	PYTHONPATH=tests/rehearsal OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q $(PYTEST_ARGS) tests/rehearsal/rehearse.py

tightness: .venv/.test-installed
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tightness.py

benchmarks: .venv/.test-installed
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/opacus_step.py

# On a machine with torch, and whatever else it has, installed for GPU_PYTHON: nothing of it is replaced, and nothing is
# looked for on a network. TensorFlow is not needed.
gpu:
	'$(GPU_PYTHON)' -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
	'$(GPU_PYTHON)' -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install -q --no-index --find-links wheels -r benchmarks/gpu-requirements.txt
	PYTHONPATH=.:adapters .venv-gpu/bin/python -m pytest -m cuda -rs $(PYTEST_ARGS) tests/opacus
	PYTHONPATH=.:adapters .venv-gpu/bin/python benchmarks/opacus_step.py --device cuda

# With the versions that this machine's own tests use.
gpu-wheels:
	'$(PYTHON)' -m pip download -q --dest wheels --only-binary :all: --no-deps --python-version $(GPU_PYTHON_VERSION) \
	    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any -c constraints-numpy2.txt \
	    -r benchmarks/gpu-requirements.txt

# Goes on where it stopped. Data sets take part whose packages are installed (benchmarks/README.md).
utility: .venv/.test-installed
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/utility/accuracy.py $(UTILITY_ARGS)

papers: .venv/.test-installed
	for script in chien_li_2024 kong_ribero_2025 chourasia_2021 chen_liu_2025 dice_sgd_2024; do \
	    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/papers/$$script.py || exit 1; done

# One process: its progress is seen at once. New random runs every time, unless PYTEST_ARGS has the --seed of one.
test-deep: .venv/.test-installed
	OMP_NUM_THREADS=1 DEEP_EXAMPLES=$(DEEP_EXAMPLES) .venv/bin/python -u -m pytest -sv --hypothesis-profile=deep \
	    -k refutes $(PYTEST_ARGS) tests/oracles/test_search.py

# The notebooks run where the tests do; the site is built in an environment of its own.
docs: .venv/.test-installed .venv-docs/.docs-installed
	OMP_NUM_THREADS=1 .venv/bin/python tools/notebooks.py
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. .venv-docs/bin/python -m mkdocs build --strict

# From a clean copy of the last commit, twice: the files have to be the same.
release: .venv-docs/.docs-installed
	.venv-docs/bin/python tools/release.py $(RELEASE_ARGS)

lint: .venv/.test-installed
	.venv/bin/python -m ruff check $(SOURCES)
	.venv/bin/python -m ruff format --check $(SOURCES)
	.venv/bin/python -m mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/python tools/language.py

format: .venv/.test-installed
	.venv/bin/python -m ruff check --fix $(SOURCES)
	.venv/bin/python -m ruff format $(SOURCES)

clean:
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv.lock .venv-*

.venv/.demo-installed: $(INSTALL_INPUTS)
	$(call install,.venv,constraints.txt,$(DEMO_REQUIREMENTS))
	@touch $@

.venv/.test-installed: $(INSTALL_INPUTS)
	$(call install,.venv,constraints.txt,$(TEST_REQUIREMENTS))
	@touch .venv/.demo-installed $@

.venv-numpy2/.test-installed: $(INSTALL_INPUTS)
	$(call install,.venv-numpy2,constraints-numpy2.txt,$(NUMPY2_REQUIREMENTS))
	@touch $@

# No versions are pinned: the newest TensorFlow is what is tried.
.venv-keras3/.test-installed: $(INSTALL_INPUTS)
	$(call install,.venv-keras3,/dev/null,$(KERAS3_REQUIREMENTS))
	@touch $@

$(PYTHON_VENV)/.test-installed: $(INSTALL_INPUTS)
	$(call install,$(PYTHON_VENV),constraints-numpy2.txt,$(NUMPY2_REQUIREMENTS))
	@touch $@

.venv-docs/.docs-installed: pyproject.toml constraints-docs.txt
	$(call install,.venv-docs,constraints-docs.txt,$(DOCS_REQUIREMENTS))
	@touch $@

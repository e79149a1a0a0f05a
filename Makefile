# Everything that a fresh machine needs is made by these targets: "make demo" and "make test".
#
#   PYTHON=/path/to/python3.11   the Python to make the environments with (3.10 to 3.13; TensorFlow Privacy
#                                needs 3.10 or 3.11). It is used when an environment is made; "make distclean"
#                                first to change it.
#   PIP_ARGS='...'               more options for pip, an --extra-index-url with PyTorch's CPU builds for example
#   PYTEST_ARGS='...'            more options for pytest
#   WORKERS=2                    test processes
#   DEEP_EXAMPLES=18             how many times the examples of "make test" that "make test-deep" searches

ifeq ($(origin PYTHON), undefined)
PYTHON := $(or $(shell for python in python3.11 python3.12 python3.10 python3.13 python3; do \
    $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
    && echo $$python && break; done), python3)
endif
WORKERS ?= 2
DEEP_EXAMPLES ?= 18
SOURCES := $(wildcard hidden_state_accountants adapters tests examples benchmarks)
CORE_TESTS := $(wildcard $(addprefix tests/, cli core laws conformance bounds soundness opacus_engine))
INSTALL_INPUTS := pyproject.toml constraints.txt constraints-numpy2.txt
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS)

DEMO_REQUIREMENTS := -e '.[opacus,examples]'
TEST_REQUIREMENTS := -e '.[all,dev]'
NUMPY2_REQUIREMENTS := -e '.[cli,opacus,dev]' scikit-learn

# An environment whose Python is gone (upgraded, moved) is not an installed one.
$(shell for venv in .venv .venv-numpy2; do \
    $$venv/bin/python -c '' 2>/dev/null || rm -f $$venv/.*-installed; done)

define CHECK_PYTHON
import platform, sys
name, version = sys.argv[1], sys.version_info[:2]
if not (3, 10) <= version <= (3, 13):
    sys.exit("%s is Python %d.%d, but Python 3.10 to 3.13 is needed. Install one, or name one: "
             "make PYTHON=/path/to/python3.11" % ((name,) + version))
if sys.platform == "darwin" and platform.machine() == "x86_64":
    sys.exit("PyTorch has no wheel of 2.3 or newer for Intel Macs, and Opacus 1.6 needs one. "
             "The core alone installs there: pip install .")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("%s has no venv module. On Debian and Ubuntu: apt install python%d.%d-venv"
             % ((name,) + version))
endef
export CHECK_PYTHON

define LOCK
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("Waiting for another installation into " + sys.argv[1])
    fcntl.flock(9, fcntl.LOCK_EX)
endef
export LOCK

# $(call install,ENVIRONMENT,CONSTRAINTS,REQUIREMENTS). ENVIRONMENT.lock is not empty while an install runs, or after
# one was killed; the next install then starts from an empty environment. numpy 1 has no wheel for Python 3.13.
define install
@'$(PYTHON)' -c '' >/dev/null 2>&1 || { \
    echo "$(PYTHON) does not run. Install Python 3.10 to 3.13, or name one: make PYTHON=/path/to/python3.11" >&2; \
    exit 1; }; \
'$(PYTHON)' -c "$$CHECK_PYTHON" '$(PYTHON)' || exit 1; \
exec 9>>$(1).lock; \
'$(PYTHON)' -c "$$LOCK" $(1) || exit 1; \
if [ -s $(1).lock ] || ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
    echo "Making $(1) with $(PYTHON)"; \
    echo unfinished >$(1).lock; \
    '$(PYTHON)' -m venv --clear $(1) || exit 1; \
fi; \
echo unfinished >$(1).lock; \
rm -f $(1)/.*-installed; \
constraints=$(2); \
! $(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 13))' || constraints=constraints-numpy2.txt; \
set -- $(1)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c $$constraints $(3); \
echo "$$@"; \
"$$@"; \
status=$$?; \
[ $$status -ge 128 ] || : >$(1).lock; \
exit $$status
endef

.PHONY: help demo test test-all test-fast test-numpy2 test-mutations tightness benchmarks lint format clean distclean
.NOTPARALLEL:

help:
	@echo "make demo         train a private model with Opacus and print its hidden-state epsilon"
	@echo "make test         everything that CI runs: lint, test-all, test-numpy2"
	@echo "make test-all     the whole test suite"
	@echo "make test-fast    the tests that are not marked slow, under 3 minutes"
	@echo "make test-numpy2  the core's and the Opacus adapter's quick tests with dp-accounting 0.6 and numpy 2"
	@echo "make test-mutations  put one mistake at a time into the engine: a test must notice each (half an hour)"
	@echo "make tightness    write docs/tightness.md: the bounds against exact values"
	@echo "make benchmarks   write docs/benchmarks/opacus_step.md: steps of the Opacus optimizers against Opacus'"
	@echo "make test-deep    about an hour of adversarial search for runs that refute a bound (not part of make test)"
	@echo "make lint         ruff, mypy and the import directions"
	@echo "make format       let ruff format and fix the sources"
	@echo "make clean        remove caches and builds"
	@echo "make distclean    remove the environments .venv and .venv-numpy2 too"
	@echo "Options: PYTHON=python3.11 PIP_ARGS='...' PYTEST_ARGS='...' WORKERS=2 DEEP_EXAMPLES=18"

demo: .venv/.demo-installed
	.venv/bin/python examples/linear_probe_opacus.py

test: lint test-all test-numpy2

test-all: .venv/.test-installed
	$(call PYTEST,.venv) $(PYTEST_ARGS) tests

test-fast: .venv/.test-installed
	$(call PYTEST,.venv) -m "not slow" $(PYTEST_ARGS) tests

test-numpy2: .venv-numpy2/.test-installed
	$(call PYTEST,.venv-numpy2) -m "not slow" $(PYTEST_ARGS) $(CORE_TESTS)

test-mutations: .venv/.test-installed
	.venv/bin/python tests/mutation/check_mutations.py

tightness: .venv/.test-installed
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tightness.py

benchmarks: .venv/.test-installed
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/opacus_step.py

# One process: its progress is seen at once. New random runs every time; a failure is replayed first.
test-deep: .venv/.test-installed
	OMP_NUM_THREADS=1 DEEP_EXAMPLES=$(DEEP_EXAMPLES) .venv/bin/python -u -m pytest -sv --hypothesis-profile=deep \
	    -k refutes $(PYTEST_ARGS) tests/soundness/test_search.py

lint: .venv/.test-installed
	.venv/bin/python -m ruff check $(SOURCES)
	.venv/bin/python -m ruff format --check $(SOURCES)
	.venv/bin/python -m mypy
	.venv/bin/lint-imports --no-logo

format: .venv/.test-installed
	.venv/bin/python -m ruff check --fix $(SOURCES)
	.venv/bin/python -m ruff format $(SOURCES)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv.lock .venv-numpy2 .venv-numpy2.lock

.venv/.demo-installed: $(INSTALL_INPUTS)
	$(call install,.venv,constraints.txt,$(DEMO_REQUIREMENTS))
	@touch $@

.venv/.test-installed: $(INSTALL_INPUTS)
	$(call install,.venv,constraints.txt,$(TEST_REQUIREMENTS))
	@touch .venv/.demo-installed $@

.venv-numpy2/.test-installed: $(INSTALL_INPUTS)
	$(call install,.venv-numpy2,constraints-numpy2.txt,$(NUMPY2_REQUIREMENTS))
	@touch $@

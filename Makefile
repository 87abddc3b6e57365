# make demo    trains a small language model over two rate-limited links in three modes, in about two minutes; its table,
#              loss plot and trace land in out/train/
# make test    all tests                       make test ARGS='tests/test_verify.py -k drop'
# make check   ruff, pyright, and the architecture test
#
# Each sets up .venv first, and again when pyproject.toml has changed. No root and no GPU are needed.

PYTHON ?= python3
# The version that the tests are run with. It is installed first and by itself: a requirement that comes along with it
# would otherwise be free to pick another build. TORCH="torch==2.12.0" or a path to a wheel takes another one.
TORCH ?= torch==2.13.0
# The wire of the demo: "1gbit", "400mbit", ... or "none" for plain loopback.
LINK ?= 1gbit
# Optimizer steps of the demo in each mode; one of all modes takes some ten seconds on two cores.
STEPS ?= 8
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT := out

.PHONY: demo test check
.DELETE_ON_ERROR:

demo: $(READY)
	@mkdir -p $(OUT)
	@set -e; link='$(LINK)'; \
	if [ "$$link" != none ]; then \
	    reason=$$($(BIN)/python -c 'from flashoverlap.lab import lab_unavailable; print(lab_unavailable() or "")'); \
	    if [ -n "$$reason" ]; then \
	        echo "No rate-limited links on this machine: $$reason"; \
	        echo "Running on plain loopback (--link none), where the wire costs CPU time: times there prove little."; \
	        link=none; \
	    fi; \
	fi; \
	set -x; \
	rm -rf $(OUT)/train; \
	$(BIN)/flashoverlap train --ranks 2 --link "$$link" --compare --steps $(STEPS) --out $(OUT)/train

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_architecture.py

# A CPU build is tried first: it is a tenth of the size, and all that the tests and the demo use. Where pip finds none,
# the default build serves as well. Training on an accelerator wants that one: make TORCH=torch==2.13.0 TORCH_CPU=
TORCH_CPU ?= $(if $(findstring +,$(TORCH)),,$(if $(findstring ==,$(TORCH)),$(TORCH)+cpu))

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "FlashOverlap needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	        "Name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "$(PYTHON) cannot make a virtual environment (Debian: install python3-venv)." >&2; exit 1; }
	@{ test -n '$(TORCH_CPU)' && $(BIN)/python -m pip install --quiet '$(TORCH_CPU)' 2>$(VENV)/torch-cpu.log; } || { \
	    echo "Installing $(TORCH) as pip finds it (no CPU build asked for or found)."; \
	    $(BIN)/python -m pip install --quiet '$(TORCH)'; }
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

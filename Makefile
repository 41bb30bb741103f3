# Two commands do everything on a fresh clone: `make demo` and `make test`. Both go through `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo demo-ppo test test-slow docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mcore-rl needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,math,mpi,gguf]'
	@touch $(STAMP)

# The main job: GRPO on two processes; makes its warm-up model first where it is missing. Continues where it stopped.
demo: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m mcore_rl train configs/demo_cpu.yaml

# The same with a critic: PPO, in a run directory of its own.
demo-ppo: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m mcore_rl train configs/demo_ppo_cpu.yaml

test: setup
	$(BIN)/python -m pytest tests -m "not slow"

# What takes minutes: the demo's own bounds, kills at random moments. Run by .ci/run after `make test`.
test-slow: setup
	$(BIN)/python -m pytest tests -m slow

# Documentation that is generated from the code.
docs: setup
	$(BIN)/python -m mcore_rl.config > docs/configuration.md

clean:
	rm -rf runs models $(VENV)

# Two commands on a fresh machine: `make train` and `make test`. Both make .venv and install what they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard offload/*/native/*.cpp offload/*/native/*.h)
PACKAGES := $(wildcard offload/*/__init__.py offload/*/*/__init__.py)
NATIVE_TESTS := $(wildcard $(foreach folder,native kernel_bits fake_cuda device/native failures/native,tests/$(folder)/*.cpp tests/$(folder)/*.h))

.PHONY: help train quick test test-all test-avx2 device test-device test-fp8 test-gpu bench check format docs wheel mutants storm storm-outside sanitize
# Tests at a time: more memory and more of the drive each. A test waits for two fifths of the time that it takes alone, for
# drives, timers, and processes that it starts or kills, so four leave a tenth of two cores idle, by calculation.
JOBS ?= 6

# Images of containers often forbid Python to keep what it compiles: then each of the hundreds of processes of the tests
# compiles torch, transformers and this package again, which is most of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help: ## Say what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /make \1 \t/' | expand -t 20

train: $(VENV)/.hf ## Train a 3.5M-parameter model from swap files, in a few minutes
	$(BIN)/offload train

# The rooms of what an edit breaks first. Files whose tests start ranks or other processes are left out.
QUICK := $(addprefix tests/,aio config fileio gradients kernels micro_batches params store swapper updates)

quick: $(VENV)/.dev ## Run the tests of the core that start no process, in a minute: for every edit
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --quick $(QUICK)

test: $(VENV)/.dev ## Run the tests: each promise once, samples of large grids
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.dev ## Run every case of every test, the slow ones too, then the mutants: hours
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --whole -m 'slow or not slow'
	$(BIN)/python -m tests.mutants

# torch, oneDNN, MKL and our kernels each choose an instruction set of their own. Processes that tests start inherit it.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OFFLOAD_ISA=avx2

test-avx2: $(VENV)/.dev ## Run the tests of arithmetic as a processor with no more than AVX2 would
	@if grep -qw avx2 /proc/cpuinfo; then \
		$(AVX2) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'numeric and not slow'; \
	else echo "make test-avx2: this processor has no AVX2, so there is nothing to limit; nothing was run"; fi

# Of each kind of use one file: graphs, looking at weights, modules, features together, tight budgets, autocast.
ON_DEVICE := tests/activations/test_activation_inputs.py \
	tests/models/test_autograd.py \
	tests/params/test_param_access.py \
	tests/models/test_module_kinds.py \
	tests/models/test_pytorch_parity.py \
	tests/swapper/test_random_budgets.py \
	tests/models/test_autocast.py \
	tests/optim/test_muon.py

# Without those whose plain optimizer computes on a CPU, and has its bits.
ON_GPU := $(filter-out tests/optim/test_muon.py,$(ON_DEVICE))

device: $(VENV)/.torch ## Build the test device, which takes half a minute and is done once for each state of its sources
	$(BIN)/python tests/device/build.py

# In one process: the start of a second takes as much CPU as half of the tests.
test-device: $(VENV)/.dev device ## Run some of the engine's tests on a device with addresses and late streams of its own
	$(BIN)/python -m pytest --device test $(ON_DEVICE)

# In a folder of its own: where torchao is installed, transformers' Trainer and peft import it, and each process of theirs takes
# longer and prints of libraries for GPUs.
TORCHAO ?= $(VENV)/torchao

$(TORCHAO): constraints.txt $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $@ -c constraints.txt torchao
	touch $@

test-fp8: $(TORCHAO) ## Run the tests of products in fp8, and of weights that torchao has quantized
	PYTHONPATH=$(abspath $(TORCHAO)) $(BIN)/python -m pytest tests/models/test_fp8.py tests/frozen/test_quantized_weights.py \
		-k "fp8 or torchao"

test-gpu: $(VENV)/.dev ## Run the tests that need a GPU, and some of the engine's tests on it
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest --device cuda $(ON_GPU)

# A folder on the drive to measure. Nothing else may run on the machine.
BENCH_FOLDER ?= .

bench: $(VENV)/.dev ## Measure training beside PyTorch and its peers, in half an hour, and write its page
	$(BIN)/python -m bench.train_page $(BENCH_FOLDER)

check: $(VENV)/.dev ## Format and lint without changing anything: ruff, mypy, clang-format; each kernel has its test of bits
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(NATIVE_TESTS)
	$(BIN)/python -m pytest -q -n 0 -p no:cacheprovider tests/kernels/test_manifest.py -k entry

format: $(VENV)/.dev ## Format everything, and write the pages that are made from code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(NATIVE_TESTS)
	$(BIN)/python -m tests.pages.configuration_page
	$(BIN)/python -m tests.pages.command_line_page
	$(BIN)/python -m tests.pages.deepspeed_names
	$(BIN)/python -m tests.pages.models_page

# Clean: what is cached of a page would outlive an edit of the docstrings that it has.
docs: $(VENV)/.docs ## Build the documentation into site/, where every broken link is an error
	$(BIN)/zensical build --strict --clean

# A compiler from PyPI and a glibc of 2018, whatever this machine has; `sh packaging/wheel.sh aarch64` makes the other one.
wheel: ## Build a wheel into dist/ that installs without a compiler, and say on which systems
	PYTHON=$(PYTHON) sh packaging/wheel.sh

mutants: $(VENV)/.dev ## Show that the tests notice faults put in on purpose
	$(BIN)/python -m tests.mutants

SEED ?= $(shell date +%s)
MINUTES ?= 5

storm: $(VENV)/.dev ## Run random trainings in random weather for MINUTES=5, from SEED on, beside the same in calm memory
	$(BIN)/python -m tests.storm --seed $(SEED) --minutes $(MINUTES) --shrink 10

storm-outside: $(VENV)/.dev ## Run random lives of runs by the installed command alone, for MINUTES=5 from SEED on, beside plain PyTorch
	$(BIN)/python -m tests.storm.outside --seed $(SEED) --minutes $(MINUTES)

sanitize: ## Run the native tests of I/O under sanitizers: addresses, undefined behaviour, threads
	sh scripts/sanitize.sh

# A stamp for each extra, so that nothing is installed twice. Python sources need no second install, but for a module that
# has become a package: the editable install knows where each module was.
$(VENV)/.hf $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch pyproject.toml CMakeLists.txt $(NATIVE) $(PACKAGES)
	$(BIN)/python scripts/install.py $*
	touch $@

# By itself, so that the test device can be compiled while one core installs the rest.
$(VENV)/.torch: constraints.txt scripts/install.py
	$(PYTHON) scripts/preflight.py
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py torch
	touch $@

# Its own packages alone: the site is built from sources, and neither torch nor the package is needed.
$(VENV)/.docs: constraints.txt scripts/install.py
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py docs
	touch $@

# Everything here works from a fresh clone with Python 3.11 or newer, pip and g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# transformers 4 has an environment of its own: it does not go with the huggingface_hub of transformers 5.
VENV4 := .venv4
# So has TRL, which brings datasets and pyarrow.
VENV_TRL := .venv-trl
# The GPU kernels are compiled and interpreted without a GPU. Triton stays beside the environment: everything else is tested without it.
TRITON := $(VENV)/triton
# The newest one that pip finds, for what depends on it most: kernels in Gluon, whose names are experimental, and launches.
NEWEST := $(VENV)/triton-newest
DEPENDS := $(wildcard tests/triton/test_hopper_*.py) tests/triton/test_compiled_words.py tests/triton/test_native.py tests/triton/test_compiled.py
DEEPSPEED := $(VENV)/deepspeed
MKDOCS := $(VENV)/mkdocs
# What `make versions` tries: the oldest torch that is supported and the newest that pip finds, on every Python that is here.
TORCHES := 2.11.0 newest
PYTHONS := python3.11 python3.12 python3.13
# What needs no compiler, and programs that go through most of the passes.
CATALOGUE := tests/cpu/test_programs.py::test_catalogue
SLICE := tests/null $(CATALOGUE)
RULES := $(sort $(wildcard tests/null/test_rules_*.py))
COVERED := --cov=moefuse --cov=passes

.DEFAULT_GOAL := help
.PHONY: help venv demo lint quick docs test test-one-process test-ranks test-transformers4 test-trl test-deepspeed versions zoo-coverage kernels line-coverage gpu deep dist-nightly bench clean

help:
	@echo "make venv   the environment, pinned, in $(VENV)"
	@echo "make demo   run examples/demo.py"
	@echo "make test   style, types, and all tests that need no GPU"
	@echo "make test-transformers4  the expert loops of transformers 4.57, all families, in an environment of their own ($(VENV4))"
	@echo "make test-trl  TRL's trainers, in an environment of their own ($(VENV_TRL)); not part of test"
	@echo "make test-deepspeed  ZeRO-3, with DeepSpeed beside the environment; not part of test"
	@echo "make versions  quick tests with other releases: TORCHES='2.11.0 newest' PYTHONS='python3.11 python3.12 python3.13'"
	@echo "make zoo-coverage  every family of transformers 5 and 4.57, each implementation, eval and train: docs/coverage.md (half an hour)"
	@echo "make quick  style, types, what needs no compiler, and a slice of the catalogue of spellings: a minute and a half on two cores"
	@echo "make kernels  the GPU kernels without a GPU: interpreted, and compiled for five targets, in part with the newest Triton too (part of test)"
	@echo "make line-coverage  line and branch coverage of all tests that need no GPU (half an hour on two cores; of a slice in make test)"
	@echo "make gpu    the tests that need a CUDA device"
	@echo "make lint   style and types only"
	@echo "make docs   the pages as a site in build/site, with a reference of the public API"
	@echo "make deep   the tests again with many more generated programs"
	@echo "make dist-nightly  all tests on several ranks, and many more drawn programs"
	@echo "make bench  benchmarks"

venv: $(STAMP)

# torch comes first and alone: its version decides what everything else has to fit.
$(STAMP): pyproject.toml requirements/torch.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/torch.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --package moefuse --module moefuse_command

docs: $(MKDOCS)/.installed
	PYTHONPATH=$(MKDOCS) $(BIN)/python -m mkdocs build --quiet --strict

quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SLICE) -x -q -n auto --dist worksteal

# Coverage is of the rules' tests and the catalogue: measuring makes what it measures twice as slow. `make line-coverage` measures the whole.
# Ranks wait for each other, types are checked on one core: beside others they cost little. Lines of both come as they are printed.
test: $(TRITON)/.installed
	$(MAKE) -j 2 --output-sync=line lint kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RULES) $(CATALOGUE) -x -q -n auto --dist worksteal $(COVERED) --cov-report=
	$(MAKE) -j 2 --output-sync=line test-one-process test-ranks
	$(BIN)/coverage json -q -o - | $(BIN)/python tests/line_coverage.py

test-one-process: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/null tests/cpu tests/contract $(addprefix --ignore ,$(RULES)) --deselect $(CATALOGUE) -x -q -n auto \
		--dist worksteal --durations 50

test-ranks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/dist -x -q --durations 10

line-coverage: $(TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/null tests/cpu tests/contract -q -n auto --dist worksteal $(COVERED) --cov=kernels --cov-report=
	PYTHONPATH=$(TRITON) OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/triton tests/contract -q -n auto $(COVERED) --cov=kernels --cov-append --cov-report=
	$(BIN)/coverage json -q -o - | $(BIN)/python tests/line_coverage.py

test-transformers4: $(VENV4)/.installed
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=deep $(VENV4)/bin/python -m pytest tests/cpu/test_transformers_loops.py -q -n auto

test-trl: $(VENV_TRL)/.installed
	OMP_NUM_THREADS=1 $(VENV_TRL)/bin/python -m pytest tests/cpu/test_trl.py -q -n auto

test-deepspeed: $(DEEPSPEED)/.installed
	PYTHONPATH=$(DEEPSPEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu/test_deepspeed.py -q

# The index decides which builds of torch these are: see tests/versions.py before this downloads gigabytes.
versions:
	$(PYTHON) tests/versions.py --torch $(TORCHES) --python $(PYTHONS)

zoo-coverage: $(STAMP) $(VENV4)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo_coverage.py --out benchmarks/results/coverage.json
	OMP_NUM_THREADS=1 $(VENV4)/bin/python benchmarks/zoo_coverage.py --out benchmarks/results/coverage.json
	$(BIN)/python benchmarks/zoo_coverage.py --page docs/coverage.md

$(VENV4)/.installed: pyproject.toml requirements/torch.txt requirements/transformers4.txt
$(VENV_TRL)/.installed: pyproject.toml requirements/torch.txt requirements/trl.txt
$(VENV4)/.installed $(VENV_TRL)/.installed:
	$(PYTHON) -m venv $(@D)
	for file in $(filter %.txt,$^); do $(@D)/bin/pip install --quiet -r $$file || exit 1; done
	$(@D)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

kernels: $(TRITON)/.installed $(NEWEST)/.installed
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/triton -x -q -n auto --dist worksteal --durations 15
	PYTHONPATH=$(TRITON) OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/triton tests/contract -x -q -n auto --dist worksteal \
		--durations 15
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest $(DEPENDS) -k "not the_rules and not the_table and (not every_activation or swiglu_oai)" \
		-x -q -n auto --dist worksteal

$(NEWEST)/.installed: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(NEWEST) triton
	@touch $@

$(TRITON)/.installed: $(STAMP) requirements/triton.txt
	$(BIN)/pip install --quiet --no-deps --target $(TRITON) -r requirements/triton.txt
	@touch $@

$(MKDOCS)/.installed: $(STAMP) requirements/docs.txt
	$(BIN)/pip install --quiet --no-deps --target $(MKDOCS) -r requirements/docs.txt
	@touch $@

$(DEEPSPEED)/.installed: $(STAMP) requirements/deepspeed.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(DEEPSPEED) -r requirements/deepspeed.txt
	@touch $@

gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu tests/contract -m gpu -x -q

dist-nightly: $(STAMP)
	HYPOTHESIS_PROFILE=deep OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/dist -q

deep: $(STAMP)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/null tests/cpu tests/contract -q

bench: $(STAMP)
	$(BIN)/python benchmarks/layer_cpu.py
	$(BIN)/python benchmarks/compile_time.py

clean:
	rm -rf $(VENV) $(VENV4) $(VENV_TRL) .versions build dist .mypy_cache .pytest_cache .ruff_cache

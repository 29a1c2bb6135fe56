# Everything is installed into .venv by the first target that needs it. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Containers often say so. Every process that a test starts would compile the package anew, and every worker all tests.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
# Both CUDA variants of ucxx install the same module, so exactly one is chosen. Neither needs a GPU.
CUDA := $(shell nvidia-smi 2>/dev/null | grep -oE 'CUDA Version: [0-9]+' | grep -oE '[0-9]+$$')
UCXX := $(if $(filter-out 0 1 2 3 4 5 6 7 8 9 10 11 12,$(CUDA)),cu13,cu12)
DEMO_EXTRAS := $(UCXX),demo
EXTRAS := bench,test,lint,site
CUPY := $(if $(filter cu13,$(UCXX)),cupy-cuda13x,cupy-cuda12x)
NATIVE := $(wildcard native/common/* native/ring/* native/ucp/* native/bindings/* native/vendor/*.h) native/CMakeLists.txt
NATIVE_TESTS := $(wildcard native/tests/*)
PACKAGE := $(shell find transport -name '*.py' -o -name '*.pyi' -o -name py.typed)
# Every pip takes the versions of constraints.txt, for what it builds with as well: the first name is that of pip before
# 25.3, the second that of later ones.
PIP := env PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip
PIP_INSTALL := $(PIP) install --quiet --disable-pip-version-check
# Steps that take more than some seconds, and whose cases cannot be counted, say so: $(WAITING) WHAT SECONDS COMMAND…
WAITING := $(PYTHON) tests/support/waiting.py

.PHONY: help install demo test pytest adapters gpu gpu-wheels native-test faults soak model lint bench bench-full docs site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up -----------------------------------------------------------------------------------------------------------
# Built without isolation, by the packages of .venv: make wheel-test then links what is compiled here.
$(VENV)/usable: pyproject.toml constraints.txt $(NATIVE) | prerequisites
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (ucxx variant $(UCXX)) …"
	@$(WAITING) "what the build needs" 20 $(PIP_INSTALL) scikit-build-core nanobind cmake ninja libucx-$(UCXX)
	@$(WAITING) "the package, compiled, and what the demo needs" 90 $(PIP_INSTALL) --no-build-isolation --editable '.[$(DEMO_EXTRAS)]'
	@touch $@

# What tests, benchmarks, lint and the site need besides; nothing is built again for it.
$(VENV)/installed: $(VENV)/usable
	@echo "installing the tools for tests, benchmarks and documentation into $(VENV) …"
	@$(WAITING) "the tools" 60 $(PIP_INSTALL) --requirement /dev/stdin < <($(BIN)/python -c 'import sys, tomllib; \
	  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*(line for name in sys.argv[1].split(",") for line in extras[name]), sep="\n")' $(EXTRAS))
	@touch $@

.PHONY: prerequisites
prerequisites:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "python3 3.11 or newer is missing: apt-get install python3 python3-venv python3-dev" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "python3-venv is missing: apt-get install python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	  { echo "the Python headers are missing: apt-get install python3-dev" >&2; exit 2; }
	@command -v g++ >/dev/null || command -v c++ >/dev/null || \
	  { echo "a C++ compiler is missing: apt-get install g++" >&2; exit 2; }

install: $(VENV)/installed ## install into .venv what is missing
	@$(BIN)/transport --version

.PHONY: constraints
constraints: $(VENV)/installed ## renew constraints.txt: the newest versions that pyproject.toml admits
	@$(BIN)/python tests/support/constraints.py

.PHONY: constraints-check
constraints-check: $(VENV)/installed ## resolve constraints.txt for each Python that pyproject.toml admits, without installing
	@$(BIN)/python tests/support/constraints.py check

.PHONY: adapters-constraints
adapters-constraints: $(VENV)/installed ## renew constraints-adapters.txt, the versions of make adapters
	@$(BIN)/python tests/support/constraints.py adapters

# --- running ----------------------------------------------------------------------------------------------------------
demo: $(VENV)/usable ## the main job: rollouts play CartPole, a trainer learns from their payloads
	@$(BIN)/transport demo

.PHONY: image-check
image-check: $(VENV)/installed ## take the steps of deploy/Dockerfile in an empty Debian; as root, with debootstrap
	@$(BIN)/python tests/support/image_steps.py

# Peers are installed once; one that failed is tried again when its folder in build/peers is removed, or by bench-peers.
build/peers/stamp: benchmarks/peers/registry.py benchmarks/install_peers.py | $(VENV)/installed
	@$(BIN)/python benchmarks/install_peers.py
	@touch $@

.PHONY: bench-peers
bench-peers: $(VENV)/installed ## install what bench compares with, each into its own build/peers/NAME
	@$(BIN)/python benchmarks/install_peers.py
	@touch build/peers/stamp

# The few that make bench needs by default; those of BENCH_JOB_OPTIONS are installed by bench-peers.
build/peers/few: benchmarks/peers/registry.py benchmarks/install_peers.py | $(VENV)/installed
	@$(BIN)/python benchmarks/install_peers.py zmq redis redis-stream pyzmq
	@touch $@

# The whole job first. BENCH_JOB_OPTIONS="--peers all" adds the peers that need a Ray cluster.
BENCH_JOB_OPTIONS ?= --peers zmq,redis,redis-stream --seconds 0.3
bench: build/peers/few | redis ## under 4 minutes: the job and reads, few sizes, beside few peers; pictures in build
	@$(BIN)/python benchmarks/job $(BENCH_JOB_OPTIONS) --sizes 4KiB,1MiB --repetitions 2 \
	  --json build/bench-job.json --plot build/bench-job.png
	@$(BIN)/transport bench loopback --sizes 64KiB,1MiB --seconds 0.4 --repetitions 1 --peers ucx_floor,pyzmq \
	  --json build/bench.json --plot build/bench.png

bench-full: build/peers/stamp | redis ## up to 25 minutes: every size, wire and peer; the pictures of docs; the ring
	@$(BIN)/python benchmarks/job $(BENCH_JOB_OPTIONS) --json build/bench-job.json --plot docs/bench-job.png
	@$(BIN)/transport bench loopback --checksum on,off --peers all --repetitions 3 --json build/bench.json --plot docs/bench.png
	@$(BIN)/python benchmarks/ring.py

# --- checking ---------------------------------------------------------------------------------------------------------
# What takes minutes and depends on its sources alone, by stamps: in make nightly, and in make test once it has run here.
BY_SOURCES := native-full model wheel-test
TEST_PARTS = native-test $(filter $(BY_SOURCES),$(notdir $(wildcard build/*))) $(ONE_THREAD) pytest
ONE_THREAD := lint site
# Each of them runs whatever the others say. Those of one thread begin first, beside the C++ tests, and are heard in their turn.
test: $(VENV)/installed ## lint, native-test, site and pytest; what failed is named at the end
	@said=$$(mktemp -d); trap 'kill $$(jobs -p) 2>/dev/null; rm -r $$said' EXIT; declare -A beside; failed=; took=; \
	for part in $(ONE_THREAD); do $(MAKE) --no-print-directory $$part >$$said/$$part 2>&1 & beside[$$part]=$$!; done; \
	for part in $(TEST_PARTS); do begun=$$SECONDS; \
	  if [ "$${beside[$$part]}" ]; then wait $${beside[$$part]}; status=$$?; cat $$said/$$part; \
	  else $(MAKE) --no-print-directory $$part; status=$$?; fi; \
	  [ $$status = 0 ] || failed="$$failed $$part"; took="$$took$$part $$((SECONDS - begun)) s, "; done; \
	  echo "$${took%, }"; [ -z "$$failed" ] || { printf '\033[31m%s\033[0m\n' "failed:$$failed" >&2; exit 1; }

# FRESH=trixie: Debian 13. FRESH_USERS='$$#': as a user without rights, then as root. What was fetched stays in build/debian.
FRESH ?= bookworm
FRESH_USERS ?= $$\#
.PHONY: fresh
fresh: ## README's commands as a new user, and as root, in a Debian of its own, with what README names alone; as root, with debootstrap
	@$(PYTHON) tests/support/fresh.py --suite $(FRESH) --users '$(FRESH_USERS)'

# KVM where it runs Debian's kernel, else emulation, which takes ten times as long. What was made stays in build/verbs.
.PHONY: verbs
verbs: ## the tests over RDMA in two virtual machines with software RoCE; SHORT=1: few of them; as root, with debootstrap
	@command -v qemu-system-x86_64 >/dev/null || { echo "installing qemu …" && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends qemu-system-x86 openssh-client debootstrap >/dev/null; }
	@$(PYTHON) tests/support/verbs $(if $(filter 1,$(SHORT)),--short)

# Tests of Redis start servers of their own; without the program they skip, and say so in red.
.PHONY: redis
redis:
	@command -v redis-server >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "installing redis-server …" && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends redis-server >/dev/null; } || \
	  printf '\033[31m%s\033[0m\n' "Redis is not tested: apt-get install redis-server" >&2

# Each worker has a /dev/shm of its own where that is allowed (tests/support/mounts.py), so that it sees only its own leaks. Tests
# wait more than they compute: two workers more than there are cores.
PYTEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 2 : 6)))
# TRY_AGAIN=1 (CI sets it) runs what failed once more, alone and one after the other, and says so: real processes on a busy machine
# fail now and then for reasons of the machine. What passes only then is a defect of the test or of the code all the same: the last
# lines name it.
TRY_AGAIN ?= 0
define tried_again
{ status=$$?; [ $(TRY_AGAIN) = 1 ] && [ $$status = 1 ] && \
	  printf '\033[31m%s\033[0m\n' "some tests failed; they run once more, alone:" && $(1) -v --last-failed --last-failed-no-failures none; }
endef
# PASSED=FILE: what it names has passed, and is left out; what passes now is added (tests/support/passed.py).
PASSED ?=
WITH_PASSED := $(if $(PASSED),--passed=$(PASSED))
pytest: $(VENV)/installed | redis
	@$(BIN)/python -m pytest $(WITH_PASSED) -n $(PYTEST_WORKERS) --dist worksteal || \
	$(call tried_again,$(BIN)/python -m pytest $(WITH_PASSED))

# What takes long and seldom finds what make pytest does not (tests/support/tiers.py). SHORT=1: two cases of each test.
SHORT ?= 0
SHARE ?= 1/1
ROOMS ?=
NIGHTLY := -m pytest --nightly --share $(SHARE) $(if $(filter 1,$(SHORT)),--short) $(ROOMS)
.PHONY: nightly-tests
nightly-tests: $(VENV)/installed | redis ## the tests that make pytest leaves out; SHARE=1/2: the first half of their files; ROOMS=tests/weights: one room's
	@$(BIN)/python $(NIGHTLY) -n $(PYTEST_WORKERS) --dist worksteal || $(call tried_again,$(BIN)/python $(NIGHTLY))

.PHONY: nightly
nightly: $(BY_SOURCES) lint-pythons nightly-tests ## kill matrices, whole jobs, clusters, soaks, many seeds; SHORT=1: a quarter of an hour
ifneq ($(SHORT),1)
	@$(MAKE) constraints-check misuse simulation soak soak-planted cluster teardown ipv6
endif

# The real frameworks: torch, CuPy, Ray, verl, cosmos-rl and TransferQueue in an environment of their own (2.6 GB), of the
# versions in constraints-adapters.txt. Nothing is skipped in silence: tests/support/frameworks.py has what may be, and why.
# Each of some tests starts a Ray cluster of its own: one worker less than make pytest has.
ADAPTERS_OPTIONS ?= -n $(shell echo $$(($(PYTEST_WORKERS) - 1))) --dist worksteal
adapters: build/adapters/installed | redis ## every test that needs a framework, with all of them installed in build/adapters
	@build/adapters/bin/python -m pytest --frameworks $(ADAPTERS_OPTIONS) || \
	$(call tried_again,build/adapters/bin/python -m pytest --frameworks)
	@build/engines/bin/python -m pytest --frameworks tests/adapters || \
	$(call tried_again,build/engines/bin/python -m pytest --frameworks tests/adapters)

build/adapters/installed: pyproject.toml constraints-adapters.txt tests/support/adapters_environment.py $(NATIVE) | $(VENV)/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/support/adapters_environment.py $(UCXX)
	@touch $@

# What its package on the index lacks: its tests, which tests/adapters/transferqueue/test_run.py runs over our backend, and
# its benchmark. A newer release than 0.1.9 has no tag.
.PHONY: transferqueue-sources
transferqueue-sources: ## TransferQueue's own tests and benchmark, into build/TransferQueue
	@test -d build/TransferQueue || \
	  git clone --quiet --depth 1 --branch v0.1.9 https://github.com/Ascend/TransferQueue build/TransferQueue || \
	  { echo "its tests are skipped: https://github.com/Ascend/TransferQueue cannot be reached" >&2; exit 1; }

# No release has its checkpoint engines.
.PHONY: nemo-rl
nemo-rl: build/adapters/installed ## the tests of its adapter with NeMo-RL's sources, which go into build/NeMo-RL
	@test -d build/NeMo-RL || { git clone --quiet --filter=blob:none https://github.com/NVIDIA-NeMo/RL build/NeMo-RL && \
	  git -C build/NeMo-RL checkout --quiet 7ea279a; }
	@PYTHONPATH=build/NeMo-RL build/adapters/bin/python -m pytest tests/adapters/test_nemo_rl.py

.PHONY: adapters-environment
adapters-environment: build/adapters/installed ## make that environment, and check that every framework can be imported

# With GPU_PYTHON=… that interpreter and its packages are used, and nothing is fetched.
ifdef GPU_PYTHON
gpu: ## with a CUDA device: build, check and time everything in one go; a table last
	@$(GPU_PYTHON) benchmarks/gpu $(GPU_OPTIONS)
else
gpu: $(VENV)/installed
	@$(BIN)/python -c 'import cupy' 2>/dev/null || $(WAITING) $(CUPY) 60 $(PIP_INSTALL) $(CUPY)
	@$(BIN)/python benchmarks/gpu $(GPU_OPTIONS)
endif

# For a machine with a device and without a network: what its interpreter lacks, to be taken there with this folder.
# pip matches the second number of a platform exactly, so that each is named.
GPU_WHEELS_PYTHON ?= 3.12
GPU_WHEELS := 'ucxx-cu13>=0.52,<0.53' 'libucxx-cu13>=0.52,<0.53' libucx-cu13 rmm-cu13 librmm-cu13 rapids-logger nvidia-ml-py \
  msgspec
gpu-wheels: ## what make gpu needs where nothing can be fetched, into build/wheels (55 MB; GPU_WHEELS_PYTHON=3.12)
	@rm -rf build/wheels && mkdir -p build/wheels
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(WAITING) "55 MB of wheels" 30 $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary=:all: \
	  --python-version $(GPU_WHEELS_PYTHON) --implementation cp \
	  $(foreach glibc,2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
	  --dest build/wheels $(GPU_WHEELS)
	@du -sh build/wheels

lint: $(VENV)/installed ## ruff, mypy, docstrings, names of classes, imports of rooms, and what the pages name
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@for each in words rooms page_names; do $(BIN)/python tests/support/$$each.py || exit 1; done
	@$(BIN)/python benchmarks/pool_reuse.py --quoted
	@$(WAITING) mypy 30 $(BIN)/mypy
	@MYPYPATH=.:tests/support:benchmarks/cluster:benchmarks/harness $(WAITING) "mypy benchmarks" 10 $(BIN)/mypy $(wildcard benchmarks/*.py)
	@MYPYPATH=. $(WAITING) "mypy benchmarks/job" 10 $(BIN)/mypy --explicit-package-bases -p benchmarks.job -m benchmarks.peers.loopback -m benchmarks.peers.plot
	@for each in harness soak cluster teardown weights gpu simulation; do \
	  MYPYPATH=.:benchmarks/harness:benchmarks/weights:benchmarks/$$each:tests/support \
	  $(WAITING) "mypy benchmarks/$$each" 10 $(BIN)/mypy benchmarks/$$each || exit 1; done

PYTHONS := 3.11 3.12 3.13
.PHONY: lint-pythons
lint-pythons: $(VENV)/installed ## mypy for every Python that pyproject.toml names
	@for each in $(PYTHONS); do $(WAITING) "mypy for $$each" 30 $(BIN)/mypy --python-version $$each || exit 1; done

# Stamps in build/: the sanitizer builds and the model take a minute each and depend on nothing but their sources.
NATIVE_TEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python native/tests/run.py --sanitizers
build/native-test: $(NATIVE) $(NATIVE_TESTS) | $(VENV)/installed
	@$(NATIVE_TEST) address
	@mkdir -p build && touch $@

native-test: build/native-test ## C++ tests of ring and engine under ASan and UBSan

build/native-full: $(NATIVE) $(NATIVE_TESTS) | $(VENV)/installed
	@$(NATIVE_TEST) thread,none,fuzz
	@mkdir -p build && touch $@

.PHONY: native-full
native-full: build/native-test build/native-full ## the same under TSan, and optimized, besides; libFuzzer for 10 s each

# Installed into an environment of its own: a stamp, too, since that takes half a minute.
build/wheel-test: $(NATIVE) $(PACKAGE) $(wildcard tests/wheel/*.py) README.md LICENSE | $(VENV)/installed
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/wheel/check.py $(UCXX)
	@touch $@

.PHONY: wheel-test
wheel-test: build/wheel-test ## wheel and sdist; the wheel installed and used where there is no compiler

# For a release. Pythons that are not installed under these names: WHEEL_PYTHONS="PATH …".
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
.PHONY: wheels
wheels: prerequisites ## wheels for each Python of WHEEL_PYTHONS and glibc 2.28 or newer, into dist/, each installed and used
	@PROJECT_URL=$(PROJECT_URL) PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PYTHON) tests/wheel/wheels.py $(UCXX) $(WHEEL_PYTHONS)

# The native modules once more, with fault points: for make soak, beside the installed ones and never in their place.
build/faults/stamp: $(NATIVE) | $(VENV)/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S native -B build/faults/tree -G Ninja -DTRANSPORT_FAULT_POINTS=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_INSTALL_PREFIX=$(CURDIR)/build/faults >/dev/null
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(WAITING) "the native modules with fault points" 60 cmake --build build/faults/tree --parallel 2 --target install >/dev/null
	@touch $@

faults: build/faults/stamp ## build the native modules with fault points, into build/faults

SOAK_OPTIONS ?= --payloads 1000000 --kills 1050 --seed 1
soak: build/faults/stamp ## a million payloads and a thousand kills, every payload accounted for (SOAK_OPTIONS=…)
	@$(BIN)/python benchmarks/soak --build build/faults --json build/soak.json $(SOAK_OPTIONS)

.PHONY: soak-planted
soak-planted: $(VENV)/installed ## short soaks with one planted fault each, which they must find (PLANTED_OPTIONS=…)
	@mkdir -p build && $(BIN)/python benchmarks/soak/mutations.py --json build/soak-planted.json $(PLANTED_OPTIONS)

build/model: $(wildcard native/model/*.pml) native/model/check.py
	@$(PYTHON) native/model/check.py; status=$$?; \
	  if [ $$status = 3 ]; then echo "SKIPPED: the models of the protocol are not checked without spin"; \
	  elif [ $$status != 0 ]; then exit $$status; else mkdir -p build && touch $@; fi

# libFuzzer over what native code is given by others; what it has learnt stays in build/native-tests/corpus.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: $(VENV)/installed ## libFuzzer over frames, answers, tickets, nested values, segments and a listener, FUZZ_SECONDS=60 each
	@command -v clang++ >/dev/null || { echo "clang++ is missing: apt-get install clang" >&2; exit 2; }
	@$(NATIVE_TEST) fuzz --fuzz-seconds $(FUZZ_SECONDS)

model: build/model ## the protocol's models: properties hold, planted faults are found (spin)

.PHONY: model-full
model-full: ## the same with the largest configurations besides
	@$(PYTHON) native/model/check.py --deep

.PHONY: pictures
pictures: $(VENV)/installed ## docs/top.svg and docs/doctor.svg, of real runs
	@$(BIN)/python benchmarks/pictures.py

.PHONY: simulation
simulation: $(VENV)/installed ## simulated hosts, trainers and members with the real decisions, SEEDS=100 seeds, and every planted fault
	@$(BIN)/python benchmarks/simulation --seeds $(or $(SEEDS),100) --jobs 2
	@$(BIN)/python benchmarks/simulation --members --seeds $(or $(SEEDS),100) --jobs 2
	@for fault in $$($(BIN)/python benchmarks/simulation --list-plants); do \
		$(BIN)/python benchmarks/simulation --plant $$fault --seeds 200 | tail -1 || exit 1; done

CLUSTER_OPTIONS ?= --hosts 8
.PHONY: cluster
cluster: $(VENV)/installed ## a job on 8 hosts that are namespaces, cut off, removed, returned, late; every payload accounted for
	@$(BIN)/python -P benchmarks/cluster --json build/cluster.json $(CLUSTER_OPTIONS)

.PHONY: misuse
misuse: $(VENV)/installed ## public calls cancelled at each await
	@for tier in "" --nightly; do \
	  MISUSE_LINES=1000000 $(BIN)/python -m pytest -q -rP $$tier tests/misuse --timeout 1200 || exit 1; done

.PHONY: ipv6
ipv6: $(VENV)/installed | redis ## tests of client and server on a host that has IPv6 alone; as root, with iproute2
	@$(BIN)/python tests/support/ipv6_alone.py $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal tests/client tests/server

.PHONY: teardown
teardown: $(VENV)/installed ## stopped with reads in flight: 1000 times in a process, 100 whole jobs with kills
	@mkdir -p build && $(BIN)/python benchmarks/teardown --json build/teardown.json
	@$(BIN)/python benchmarks/teardown --mode process --cycles 90 --warm-up 10 --json build/teardown-served.json
	@$(BIN)/python benchmarks/teardown --jobs 100 --json build/teardown-jobs.json

.PHONY: house
house: $(VENV)/installed ## docs/house.svg, the rooms and what they import, from the code
	@$(BIN)/python tests/support/rooms.py picture

docs: $(VENV)/installed ## run the code blocks of the documentation
	@$(BIN)/python -m pytest tests/docs/test_docs.py

site: $(VENV)/installed ## docs/ as a site with search in build/site; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(WAITING) "the site" 10 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; make site-serve has the search, too"

.PHONY: site-serve
site-serve: site ## the site at http://127.0.0.1:8000, until Ctrl-C
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

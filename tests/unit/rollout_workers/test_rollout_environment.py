"""Versions, environment variables and options, checked before an engine is started."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from kv_policies.config import DenseConfig, SnapKVConfig
from rollout_workers.actor import actor_options
from rollout_workers.config import RolloutConfig, SamplingConfig
from rollout_workers.environment import apply_environment, engine_environment
from rollout_workers.stats import StepMeter
from rollout_workers.versions import UnsupportedVersion, check_packages, check_python, check_versions


def test_this_installation_is_supported() -> None:
    check_versions()


@pytest.mark.parametrize("found", [(3, 10), (3, 15), (2, 7)])
def test_refuses_python(found) -> None:
    with pytest.raises(UnsupportedVersion, match=r"Python: expected at least 3.11 and below 3.15, got \d"):
        check_python(found)


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({"vllm": "0.31.2"}, r"vLLM: expected 0.32.\*, got 0.31.2"),
        ({"vllm": None}, r"vLLM: expected 0.32.\*, found none"),
        ({"torch": "2.12.1+cpu"}, r"torch: expected 2.13.\*, got 2.12.1\+cpu"),
        ({"torchvision": "0.28.0"}, r"torchvision: expected none or a CPU build .*pip uninstall torchvision"),
    ],
)
def test_refuses_packages(packages, message: str) -> None:
    good = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "torchvision": None}
    check_packages(**good)
    check_packages(**good | {"torchvision": "0.28.0+cpu"})
    check_packages(**good | {"torch": "2.13.0", "torchvision": "0.28.0"})
    with pytest.raises(UnsupportedVersion, match=message) as error:
        check_packages(**good | packages)
    assert "\n" not in str(error.value)


def test_threads_reach_the_environment() -> None:
    environment = engine_environment(RolloutConfig(num_threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert all(isinstance(value, str) for value in environment.values())


def test_late_environment_respects_what_is_set(monkeypatch) -> None:
    for name in engine_environment(RolloutConfig()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    apply_environment(RolloutConfig(num_threads=2))
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["MKL_NUM_THREADS"] == "2"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine core must live in this process"


def test_actor_options() -> None:
    options = actor_options(RolloutConfig(num_cpus_per_engine=0.25, num_gpus_per_engine=1, num_threads=2))
    assert (options["num_cpus"], options["num_gpus"]) == (0.25, 1)
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_importing_the_actor_is_light() -> None:
    code = "import sys, rollout_workers.actor; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_dense_engines_are_stock_vllm() -> None:
    from rollout_workers.sparse_kv.options import engine_options

    assert engine_options(DenseConfig()) == {}
    options = engine_options(SnapKVConfig(budget_tokens=64))
    assert options["enable_prefix_caching"] is False
    assert options["worker_cls"].startswith("rollout_workers.")


@pytest.mark.parametrize("temperature", [0.0, 0.005, -1.0])
def test_temperatures_that_vllm_would_change_are_refused(temperature: float) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        SamplingConfig(temperature=temperature)


def test_meter() -> None:
    meter = StepMeter()
    assert meter.mean_running == 0.0
    meter.step(seconds=0.5, num_running=4, num_blocks=9)
    meter.step(seconds=0.25, num_running=1, num_blocks=3)
    assert (meter.generate_seconds, meter.max_running, meter.mean_running, meter.peak_blocks) == (0.75, 4, 2.5, 9)

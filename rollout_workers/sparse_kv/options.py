"""How a policy travels into an engine: as plain data in `VllmConfig.additional_config`."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kv_policies.config import DenseConfig, PolicyConfig
from kv_policies.policy import Need, Policy
from kv_policies.registry import build_policy

_KEY = "penumbra_policy"
_SUPPORTED_NEEDS = frozenset({Need.WINDOW_QUERIES, Need.KEYS})


def engine_options(policy: PolicyConfig) -> dict[str, Any]:
    """Engine arguments that make vLLM evict under `policy`; none for dense sampling.

    Prefix caching is off: compaction rewrites blocks in place, so no other request may read them.

    Raises:
        ValueError: the policy needs something that the engine cannot show it, or this is not vLLM's CPU build.
    """
    if isinstance(policy, DenseConfig):
        return {}
    if not current_platform.is_cpu():
        raise ValueError(
            f"policy.type: expected dense on {current_platform.device_name}, got {policy.type}: "
            "eviction is implemented for vLLM's CPU attention only"
        )
    built = build_policy(policy)
    assert built is not None
    if missing := built.needs - _SUPPORTED_NEEDS:
        raise ValueError(
            f"policy {policy.type}: expected a policy that needs only {sorted(n.value for n in _SUPPORTED_NEEDS)}, "
            f"got one that needs {sorted(n.value for n in missing)}"
        )
    return {
        "worker_cls": "rollout_workers.sparse_kv.worker.SparseCPUWorker",
        "scheduler_cls": "rollout_workers.sparse_kv.scheduler.SparseScheduler",
        "additional_config": {_KEY: policy.model_dump(mode="json")},
        "enable_prefix_caching": False,
    }


def policy_of(vllm_config: VllmConfig) -> Policy:
    """The policy that `engine_options` put into an engine's configuration."""
    options = vllm_config.additional_config
    assert isinstance(options, dict) and _KEY in options, "the engine was not configured by engine_options"
    policy = build_policy(TypeAdapter(PolicyConfig).validate_python(options[_KEY]))
    assert policy is not None
    return policy

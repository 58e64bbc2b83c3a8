"""From a policy's configuration to the policy."""

from __future__ import annotations

from kv_policies.config import DenseConfig, PolicyConfig, RandomConfig, SnapKVConfig, StreamingLLMConfig
from kv_policies.policy import Policy
from kv_policies.random import Random
from kv_policies.snapkv import SnapKV
from kv_policies.streaming_llm import StreamingLLM


def build_policy(config: PolicyConfig) -> Policy | None:
    """The policy that `config` describes; None for dense sampling."""
    match config:
        case DenseConfig():
            return None
        case SnapKVConfig():
            return SnapKV(config)
        case StreamingLLMConfig():
            return StreamingLLM(config)
        case RandomConfig():
            return Random(config)

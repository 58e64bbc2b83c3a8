"""Configuration of sampling and of the rollout engines."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SamplingConfig(BaseModel):
    """How responses are drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    group_size: int = Field(default=8, ge=1)
    """G: responses per prompt."""
    max_response_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0.01)
    """At least 0.01: vLLM silently raises what is lower, and would sample from another distribution than it reports."""
    top_p: float = 1.0
    top_k: int = -1
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the engines' random state."""

    @model_validator(mode="after")
    def _refuse_truncated_distributions(self) -> SamplingConfig:
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p: expected 1.0, got {self.top_p}: the learner would have to renormalise every log-probability "
                "over the same nucleus, which it does not do"
            )
        if self.top_k != -1:
            raise ValueError(
                f"top_k: expected -1 (off), got {self.top_k}: the learner would have to renormalise every "
                "log-probability over the same tokens, which it does not do"
            )
        return self


class RolloutConfig(BaseModel):
    """One vLLM engine and how many actors host one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_engines: int = Field(default=1, ge=1)
    num_cpus_per_engine: float = Field(default=0.5, gt=0)
    num_gpus_per_engine: float = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = Field(default=2048, ge=2)
    """Longest prompt + response, in tokens."""
    kv_cache_bytes: int = Field(default=256 * 2**20, ge=1)
    """Size of the KV pool of one engine."""
    block_size: int = Field(default=32, ge=1)
    """Tokens per KV block (a multiple of 32 on CPU)."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most requests that run at once."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Most tokens of one engine step; prompts longer than that are prefilled in chunks."""
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads of one engine on CPU."""

    @model_validator(mode="after")
    def _check_model_len(self) -> RolloutConfig:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        return self

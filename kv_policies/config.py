"""Configuration of the KV policies. Imports neither torch nor anything else of this project."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BudgetedPolicyConfig(BaseModel):
    """What every evicting policy shares: how many keys of the context it keeps.

    The *context* is the prompt without its last token (that token is the first row to run against the compressed
    cache). Exactly one of the two budgets is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    budget_tokens: int | None = Field(default=None, ge=1)
    """Keys kept of the context, per layer and KV head."""

    budget_ratio: float | None = Field(default=None, gt=0, le=1)
    """The same as a fraction of the prompt's tokens, resolved to tokens once per prompt (rounded up)."""

    @property
    def min_budget_tokens(self) -> int:
        """The keys that the policy always keeps (window, sinks): no budget may be below it."""
        return 1

    @model_validator(mode="after")
    def _check_budget(self) -> BudgetedPolicyConfig:
        if (self.budget_tokens is None) == (self.budget_ratio is None):
            raise ValueError(
                "budget_tokens, budget_ratio: expected exactly one of the two, "
                f"got budget_tokens={self.budget_tokens}, budget_ratio={self.budget_ratio}"
            )
        if self.budget_tokens is not None and self.budget_tokens < self.min_budget_tokens:
            raise ValueError(
                f"budget_tokens: expected at least {self.min_budget_tokens} (what the policy always keeps: "
                f"window, sinks), got {self.budget_tokens}"
            )
        return self

    def resolve_budget(self, num_prompt_tokens: int) -> int:
        """Keys of the context that survive for a prompt of `num_prompt_tokens` tokens, before min(context, .)."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_ratio is not None
        return max(self.min_budget_tokens, math.ceil(self.budget_ratio * num_prompt_tokens))


class DenseConfig(BaseModel):
    """No eviction: stock vLLM, no code of this project in its path."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    type: Literal["dense"] = "dense"


class SnapKVConfig(BudgetedPolicyConfig):
    """SnapKV (arXiv 2404.14469): pooled attention of the last `window_tokens` context queries."""

    type: Literal["snapkv"] = "snapkv"
    window_tokens: int = Field(default=32, ge=1)
    """Observation window: its queries vote, its keys are always kept."""
    pool_kernel: int = Field(default=5, ge=1)
    """Average-pooling kernel over key positions (odd)."""

    @property
    def min_budget_tokens(self) -> int:
        return self.window_tokens

    @model_validator(mode="after")
    def _check_kernel(self) -> SnapKVConfig:
        if self.pool_kernel % 2 == 0:
            raise ValueError(f"pool_kernel: expected an odd number, got {self.pool_kernel}")
        return self


class StreamingLLMConfig(BudgetedPolicyConfig):
    """StreamingLLM (arXiv 2309.17453): attention sinks and the most recent keys, at their true positions."""

    type: Literal["streaming_llm"] = "streaming_llm"
    num_sink_tokens: int = Field(default=4, ge=0)

    @property
    def min_budget_tokens(self) -> int:
        return self.num_sink_tokens + 1


class RandomConfig(BudgetedPolicyConfig):
    """Uniformly random keys per layer and head beside the last `window_tokens`; the baseline of the ablations."""

    type: Literal["random"] = "random"
    window_tokens: int = Field(default=8, ge=1)
    """The most recent keys, always kept."""
    seed: int = Field(default=0, ge=0)

    @property
    def min_budget_tokens(self) -> int:
        return self.window_tokens


PolicyConfig = Annotated[
    DenseConfig | SnapKVConfig | StreamingLLMConfig | RandomConfig,
    Field(discriminator="type"),
]

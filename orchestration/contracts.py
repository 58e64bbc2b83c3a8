"""The nouns that cross between packages: frozen, picklable, free of torch, vLLM, Ray and DeepSpeed.

Shapes: B batch, G group size, L layers, H query heads, H_kv KV heads, P prompt tokens, R response tokens, T = P + R.

    PromptGroup --> rollout_workers --> Trajectory (with its ShadowMask) --> TrainingBatch --> learner
         ^                                                                                       |
         +----------------------------------- WeightSnapshot <-----------------------------------+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kv_policies.shadow_mask import ShadowMask

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt, sampled `num_samples` times.

    Example:
        >>> PromptGroup(group_id="step0-3", prompt_token_ids=(5, 7, 9), num_samples=8, answer="12").num_samples
        8
    """

    group_id: str
    prompt_token_ids: tuple[int, ...]
    num_samples: int
    answer: Any = None
    """Reference for the reward function; must be JSON-serialisable."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the dataset row, handed to the reward function; must be JSON-serialisable."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"PromptGroup {self.group_id}: prompt_token_ids: expected at least 1 token, got none")
        if self.num_samples < 1:
            raise ValueError(f"PromptGroup {self.group_id}: num_samples: expected at least 1, got {self.num_samples}")


@dataclass(frozen=True, kw_only=True)
class KVStats:
    """What one sample cost in KV cache.

    Example:
        >>> KVStats(context_tokens=100, context_kept=50, peak_blocks=5, final_blocks=3).retained_fraction
        0.5
    """

    context_tokens: int
    """P - 1: the keys that a dense cache would hold when the first response token is sampled."""
    context_kept: int
    """Keys that survived, per layer and KV head."""
    peak_blocks: int
    """Most KV blocks that the request held at one time (the dense prefill included)."""
    final_blocks: int
    """KV blocks that it held when it finished."""

    @property
    def retained_fraction(self) -> float:
        """context_kept / context_tokens; 1.0 for a prompt of one token."""
        return self.context_kept / self.context_tokens if self.context_tokens else 1.0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sampled response, with everything the learner needs to replay it exactly.

    Example:
        >>> t = Trajectory(group_id="g", sample_index=0, prompt_token_ids=(1, 2), response_token_ids=(3,),
        ...     logprobs=np.array([-0.5], np.float32), temperature=1.0, finish_reason="stop", weight_versions=(0,),
        ...     policy="dense", mask=ShadowMask.dense(num_tokens=3, num_layers=2, num_kv_heads=1),
        ...     kv=KVStats(context_tokens=1, context_kept=1, peak_blocks=1, final_blocks=1))
        >>> t.num_tokens
        3
    """

    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    """R tokens, the stop token included when the finish reason is "stop"."""
    logprobs: np.ndarray
    """float32 [R], nats: log-probability of each response token under the exact distribution it was drawn from
    (temperature applied)."""
    temperature: float
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    """Every weight version under which a token was sampled, ascending; one entry unless weights moved in flight."""
    policy: str
    """`type` of the KV policy."""
    mask: ShadowMask
    """Covers all T tokens."""
    kv: KVStats
    text: str = ""
    """The response decoded, special tokens skipped; for rewards and people, never re-tokenised."""
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    """None until scored."""

    def __post_init__(self) -> None:
        where = f"Trajectory {self.group_id}/{self.sample_index}"
        num_response = len(self.response_token_ids)
        if self.logprobs.shape != (num_response,) or self.logprobs.dtype != np.float32:
            raise ValueError(
                f"{where}: logprobs: expected float32 [{num_response}] (one per response token), "
                f"got {self.logprobs.dtype} {list(self.logprobs.shape)}"
            )
        if self.mask.num_tokens != self.num_tokens:
            raise ValueError(
                f"{where}: mask: expected to cover {self.num_tokens} tokens "
                f"({len(self.prompt_token_ids)} prompt + {num_response} response), got {self.mask.num_tokens}"
            )
        if self.policy != "dense" and self.kv.context_kept < self.kv.context_tokens and not self.mask.events:
            raise ValueError(
                f"{where}: mask: policy {self.policy} evicted {self.kv.context_tokens - self.kv.context_kept} keys, "
                "expected at least one eviction event, got a dense mask"
            )

    @property
    def num_tokens(self) -> int:
        """T = P + R."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """What one optimiser step consumes: scored trajectories, each with its advantage.

    Example:
        >>> TrainingBatch(trajectories=(), advantages=np.zeros(0, np.float32), weight_version=0).num_response_tokens
        0
    """

    trajectories: tuple[Trajectory, ...]
    advantages: np.ndarray
    """float32 [B]."""
    weight_version: int
    """The learner's version when the batch was built."""

    def __post_init__(self) -> None:
        if self.advantages.shape != (len(self.trajectories),):
            raise ValueError(
                f"TrainingBatch: advantages: expected [{len(self.trajectories)}] (one per trajectory), "
                f"got {list(self.advantages.shape)}"
            )

    @property
    def num_response_tokens(self) -> int:
        return sum(len(t.response_token_ids) for t in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class WeightBucket:
    """Some whole parameters, back to back in one flat buffer.

    Example:
        >>> WeightBucket(names=("w",), shapes=((2,),), dtypes=("float32",), data=np.zeros(8, np.uint8),
        ...     checksum="").names
        ('w',)
    """

    names: tuple[str, ...]
    """HF parameter names, in order."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    """torch dtype names without the prefix: "float32", "bfloat16"."""
    data: np.ndarray
    """uint8 [sum of bytes], parameters in order, C layout, no padding."""
    checksum: str
    """Hex blake2b-128 of `data`."""


@dataclass(frozen=True, kw_only=True)
class WeightSnapshot:
    """A whole set of weights under one version.

    Example:
        >>> WeightSnapshot(version=3, checksum="ab", buckets=()).version
        3
    """

    version: int
    """0 is the model as loaded; each optimiser step that is published adds one."""
    checksum: str
    """Hex blake2b-128 over the bucket checksums, in order."""
    buckets: tuple[Any, ...]
    """`WeightBucket`s, or `ray.ObjectRef`s to them: an actor fetches them one at a time."""

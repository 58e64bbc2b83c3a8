"""The configuration of a run: one pydantic model per section, read from TOML. Imports neither torch nor vLLM.

    defaults  <  TOML files, left to right  <  --set section.key=value

A later layer wins key by key. Where it gives a table another `type` (another policy, another task), the earlier keys
that the new type doesn't have are dropped and the others stay, so `--set policy.type=dense` works on any file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kv_policies.config import DenseConfig, PolicyConfig
from learner.config import LearnerConfig
from orchestration.config_files import ConfigError, describe_errors, merge, parse_overrides, read_toml
from orchestration.tasks.config import NeedleConfig, TaskConfig
from rollout_workers.config import RolloutConfig, SamplingConfig

__all__ = ["ConfigError", "ModelConfig", "RunConfig", "RunSettings", "dump_config", "load_config"]


class RunSettings(BaseModel):
    """How long the run is and what it leaves behind."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(default="run", pattern=r"^[\w.-]+$")
    """Name of the run; the run folder is made under `output_dir` with it."""
    output_dir: str = Field(default="runs", min_length=1)
    """Folder of run folders."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the prompts and of the learner (engines have `sampling.seed`)."""
    num_steps: int = Field(default=50, ge=1)
    """Optimiser steps."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts of one step; each is sampled `sampling.group_size` times."""
    eval_prompts: int = Field(default=64, ge=0)
    """Held-out prompts, sampled before and after training; 0: no evaluation."""
    eval_samples_per_prompt: int = Field(default=1, ge=1)
    """Responses per held-out prompt."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Evaluate every so many steps as well; 0: only before and after."""
    checkpoint_every_steps: int = Field(default=0, ge=0)
    """Save a checkpoint every so many steps; 0: only the final model."""


class ModelConfig(BaseModel):
    """The model to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    path: str = Field(min_length=1)
    """Hugging Face folder: config, weights, tokenizer."""


class RunConfig(BaseModel):
    """Everything that a run depends on; saved in its run folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    run: RunSettings = RunSettings()
    model: ModelConfig
    task: TaskConfig
    policy: PolicyConfig = DenseConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole response."""
        return self.rollout.max_model_len - self.sampling.max_response_tokens

    @model_validator(mode="after")
    def _check_lengths(self) -> RunConfig:
        if self.max_prompt_tokens < 1:
            raise ValueError(
                "rollout.max_model_len, sampling.max_response_tokens: expected max_model_len to hold a response and at "
                f"least 1 prompt token, got {self.rollout.max_model_len} and {self.sampling.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _check_needle(self) -> RunConfig:
        if isinstance(self.task, NeedleConfig) and self.sampling.max_response_tokens < self.task.num_needles + 1:
            raise ValueError(
                "sampling.max_response_tokens, task.num_needles: expected room for every needle and the stop token "
                f"({self.task.num_needles + 1}), got {self.sampling.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _check_hardware(self) -> RunConfig:
        if self.rollout.num_gpus_per_engine and not isinstance(self.policy, DenseConfig):
            raise ValueError(
                'policy.type, rollout.num_gpus_per_engine: expected policy.type = "dense" on GPUs (eviction is '
                f"implemented for vLLM's CPU attention only), got {self.policy.type!r} with "
                f"{self.rollout.num_gpus_per_engine:g} GPU(s) per engine"
            )
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> RunConfig:
        budget = getattr(self.policy, "budget_tokens", None)
        if budget is not None and budget >= self.rollout.max_model_len:
            raise ValueError(
                f"policy.budget_tokens, rollout.max_model_len: expected a budget below {self.rollout.max_model_len} "
                f"(no prompt is longer, so nothing would ever be evicted), got {budget}"
            )
        return self


def load_config(paths: Sequence[Path | str], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a configuration.

    Args:
        paths: TOML files; a later file wins key by key.
        overrides: "section.key=value" each. The value is TOML ("3", "1e-6", "true", '["a"]'); anything that is not
            is taken as a bare string. An empty value ("policy.budget_ratio=") unsets what the files say.

    Raises:
        ConfigError: a file that is missing or not TOML, an unknown key, a value that is refused. One line a problem.
    """
    data: dict = {}
    for path in paths:
        data = merge(RunConfig, data, read_toml(Path(path)))
    data = merge(RunConfig, data, parse_overrides(overrides))
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe_errors(RunConfig, data, error)) from None


def dump_config(config: RunConfig) -> str:
    """The configuration as TOML, every default included; `load_config` reads it back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))

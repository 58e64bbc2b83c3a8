"""Configuration of the learner: objective, optimiser, DeepSpeed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AlgorithmConfig(BaseModel):
    """The objective: GRPO (arXiv 2402.03300) on masked log-probabilities, plus the distillation term."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    type: Literal["grpo"] = "grpo"
    clip_ratio: float = Field(default=0.2, gt=0)
    """epsilon of the clipped importance ratio."""
    distillation_weight: float = Field(default=0.1, ge=0)
    """lambda of KL(sg[dense] || masked), over the full vocabulary."""
    measure_dense: bool = True
    """Run the dense teacher even if `distillation_weight` is 0, for the dense mismatch and the KL as gauges."""

    @model_validator(mode="after")
    def _teacher_runs(self) -> AlgorithmConfig:
        if self.distillation_weight > 0 and not self.measure_dense:
            raise ValueError(
                "measure_dense: expected true while distillation_weight is above 0 (distillation needs the dense "
                f"teacher), got measure_dense=false, distillation_weight={self.distillation_weight}"
            )
        return self


class OptimizerConfig(BaseModel):
    """AdamW."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    learning_rate: float = Field(default=1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up from 0: step i runs at i / warmup_steps of the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to 0 at the last step of the run."""
    max_grad_norm: float = Field(default=1.0, gt=0)


class LearnerConfig(BaseModel):
    """One DeepSpeed engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    zero_stage: Literal[0, 1, 2, 3] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_cpus: float = Field(default=0.5, gt=0)
    num_gpus: float = Field(default=0, ge=0)
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads on CPU."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most padded tokens of one forward pass; a longer single sequence still runs alone."""
    packing: bool = True
    """Put several sequences into one row instead of padding each to the longest."""
    gradient_checkpointing: bool = False
    attention_chunk_rows: int = Field(default=256, ge=1)
    """Query rows per chunk of the `bias` attention: its memory is O(chunk x S)."""
    logit_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens per chunk of full-vocabulary logits."""
    weight_bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest bucket of a weight push (a parameter larger than that travels alone)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="after")
    def _stage_fits_dtype(self) -> LearnerConfig:
        # DeepSpeed 0.19.8, stage 0, bfloat16: gradients accumulate in bfloat16, and the optimizer takes a step on zero
        # gradients when it is made, so that Adam's first real update is 0.73 of what it should be.
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "zero_stage: expected 1, 2 or 3 with dtype bfloat16 (stage 0 accumulates gradients in bfloat16), "
                "got zero_stage=0"
            )
        return self

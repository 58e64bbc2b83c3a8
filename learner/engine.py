"""The learner: an HF model under DeepSpeed that trains on trajectories under their shadow masks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch
from transformers import get_scheduler

from learner.checkpoint import save_checkpoint
from learner.collate import MicroBatch, check_fits_model, collate
from learner.config import LearnerConfig
from learner.environment import check_environment
from learner.mismatch import MismatchStats
from learner.model import Objective, PolicyModel, load_model
from learner.scoring import score
from learner.weights import combine_checksums, make_buckets
from orchestration.contracts import TrainingBatch, Trajectory, WeightBucket, WeightSnapshot


class Learner:
    """One rank of DeepSpeed around one model.

    Args:
        model_path: HF folder.
        config: what to optimise, and how.
        seed: of torch's generators.
        total_steps: optimiser steps of the run; needed by schedules that decay.

    Raises:
        ValueError: the model, the environment or the schedule is refused.
    """

    def __init__(
        self, model_path: str | Path, config: LearnerConfig, *, seed: int = 0, total_steps: int | None = None
    ) -> None:
        check_environment()
        optimizer_config = config.optimizer
        if optimizer_config.schedule != "constant" and total_steps is None:
            raise ValueError(f"total_steps: expected a number for schedule {optimizer_config.schedule}, got None")
        torch.manual_seed(seed)
        torch.set_num_threads(config.num_threads)
        self._config = config
        self._model_path = Path(model_path)
        causal_lm = load_model(model_path, dtype=config.dtype)
        # Checkpointing is on in train mode only; dropout, the other thing that train mode turns on, was refused.
        causal_lm.train()
        if config.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = PolicyModel(
            causal_lm,
            attention_chunk_rows=config.attention_chunk_rows,
            logit_chunk_tokens=config.logit_chunk_tokens,
        )
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer_config.learning_rate,
            betas=optimizer_config.betas,
            eps=optimizer_config.epsilon,
            weight_decay=optimizer_config.weight_decay,
        )
        name = optimizer_config.schedule if optimizer_config.schedule != "constant" else "constant_with_warmup"
        scheduler = get_scheduler(name, optimizer, optimizer_config.warmup_steps, total_steps)
        _skip_shared_memory_build()
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=deepspeed_config(config)
        )
        self._version = 0

    @property
    def weight_version(self) -> int:
        """Optimiser steps taken since the model was loaded."""
        return self._version

    def train_step(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimiser step on a whole batch, in micro-batches.

        Returns:
            loss/total, loss/policy, loss/distillation_kl; mismatch/{masked,dense}_{mean,p95,p99,max}, in nats, before
            the step; policy/{ratio_mean,clip_fraction,entropy}; optimizer/grad_norm (before clipping),
            optimizer/learning_rate (of this step); batch/{sequences,response_tokens}; time/learner_s. Means are over
            response tokens. Without the dense teacher its metrics are absent.

        Raises:
            ValueError: no response token, or a trajectory of another model.
            FloatingPointError: the loss is not finite. The weights are untouched and can be saved; gradients of
                earlier micro-batches remain, so no further step may follow.
        """
        start = time.perf_counter()
        if not batch.num_response_tokens:
            raise ValueError("TrainingBatch: trajectories: expected at least one response token, got none")
        check_fits_model(batch.trajectories, self._engine.module.causal_lm.config)
        algorithm = self._config.algorithm
        objective = Objective(
            clip_ratio=algorithm.clip_ratio,
            distillation_weight=algorithm.distillation_weight,
            num_response_tokens=batch.num_response_tokens,
            run_teacher=algorithm.measure_dense,
        )
        tokens = self._accumulate_gradients(batch, objective)
        learning_rate = self._engine.get_lr()[0]
        grad_norm = self._optimizer_step()
        self._version += 1
        return _summarise(tokens, objective) | {
            "optimizer/grad_norm": grad_norm,
            "optimizer/learning_rate": learning_rate,
            "batch/sequences": float(len(batch.trajectories)),
            "batch/response_tokens": float(batch.num_response_tokens),
            "time/learner_s": time.perf_counter() - start,
        }

    def score(self, trajectories: Sequence[Trajectory], *, masked: bool = True) -> list[np.ndarray]:
        """Log-probabilities of response tokens under the current weights: B arrays float32 [R]."""
        check_fits_model(trajectories, self._engine.module.causal_lm.config)
        return score(self._engine, trajectories, masked=masked, config=self._config, to_device=self._to_device)

    def publish(self, store: Callable[[WeightBucket], Any] = lambda bucket: bucket) -> WeightSnapshot:
        """Packs all weights.

        Args:
            store: called with each bucket as it is packed; what it returns goes into the snapshot (an actor passes
                `ray.put`).
        """
        checksums, buckets = [], []
        for bucket in self._buckets():
            checksums.append(bucket.checksum)
            buckets.append(store(bucket))
        return WeightSnapshot(version=self._version, checksum=combine_checksums(checksums), buckets=tuple(buckets))

    def weights_checksum(self) -> str:
        """The checksum that `publish` would give."""
        return combine_checksums(bucket.checksum for bucket in self._buckets())

    def save_hf(self, path: str | Path) -> None:
        """Writes an HF folder that transformers and vLLM load; see `save_checkpoint`."""
        weights = {name: weight.detach().cpu().clone() for name, weight in self._weights()}
        save_checkpoint(self._engine.module.causal_lm, weights, source=self._model_path, target=Path(path))

    def _accumulate_gradients(self, batch: TrainingBatch, objective: Objective) -> dict[str, np.ndarray]:
        """Runs all micro-batches; returns the statistics of all their tokens."""
        outputs: list[dict[str, torch.Tensor]] = []
        micro_batches = collate(
            batch.trajectories,
            batch.advantages,
            micro_batch_tokens=self._config.micro_batch_tokens,
            packing=self._config.packing,
        )
        for micro_batch in micro_batches:
            output = self._engine(self._to_device(micro_batch), objective)
            loss = output.pop("loss")
            if not torch.isfinite(loss):
                raise FloatingPointError(f"loss: expected a finite number, got {loss.item()}")
            self._engine.backward(loss)
            output["sampler_logprobs"] = micro_batch.sampler_logprobs
            outputs.append({name: value.cpu() for name, value in output.items()})
        return {name: torch.cat([output[name] for output in outputs]).numpy() for name in outputs[0]}

    def _optimizer_step(self) -> float:
        """Clips, steps, zeroes the gradients; returns the gradient norm before clipping."""
        grad_norm = None
        if self._config.zero_stage == 0:
            # Without ZeRO, DeepSpeed clips but does not tell the norm.
            grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(grads)
        self._engine.step()
        return float(self._engine.get_global_grad_norm() if grad_norm is None else grad_norm)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole parameter), one at a time: under ZeRO-3 each is gathered while it is being looked at."""
        for name, parameter in self._engine.module.causal_lm.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._config.zero_stage == 3):
                yield name, parameter

    def _buckets(self) -> Iterator[WeightBucket]:
        return make_buckets(self._weights(), max_bytes=self._config.weight_bucket_bytes)

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        return batch.to(self._engine.device)


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    return {
        # Only a formality: micro-batches are bounded by tokens.
        "train_micro_batch_size_per_gpu": 1,
        # The number of micro-batches changes from step to step, so `step()` itself is the boundary, and losses, which
        # have their final denominator already, are not divided by a number of accumulation steps.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        # bfloat16 sums of many micro-batches would lose the small gradients.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }


def _summarise(tokens: dict[str, np.ndarray], objective: Objective) -> dict[str, float]:
    """Metrics from the statistics of all response tokens of a step."""
    sampler = tokens["sampler_logprobs"]
    policy_loss = float(tokens["policy_loss"].mean(dtype=np.float64))
    metrics = {
        "loss/total": policy_loss,
        "loss/policy": policy_loss,
        **MismatchStats.of(tokens["logprobs"], sampler).metrics("mismatch/masked"),
        "policy/ratio_mean": float(tokens["ratio"].mean(dtype=np.float64)),
        "policy/clip_fraction": float(tokens["clipped"].mean()),
        "policy/entropy": float(tokens["entropy"].mean(dtype=np.float64)),
    }
    if objective.run_teacher:
        kl = float(tokens["distillation_kl"].mean(dtype=np.float64))
        metrics["loss/total"] += objective.distillation_weight * kl
        metrics["loss/distillation_kl"] = kl
        metrics |= MismatchStats.of(tokens["dense_logprobs"], sampler).metrics("mismatch/dense")
    return metrics


def _skip_shared_memory_build() -> None:
    """DeepSpeed compiles a shared-memory collective when it starts on CPU: 30 s, a compiler and ninja, for nothing
    that one rank needs. This is the table in which it looks whether the extension can be built."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

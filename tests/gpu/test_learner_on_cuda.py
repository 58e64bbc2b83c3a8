"""The learner on CUDA against the CPU, where every number is proved. `python -m pytest tests/gpu` on a GPU machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.actor import LearnerActor, actor_options
from learner.config import LearnerConfig, OptimizerConfig
from learner.replay import replay
from orchestration.contracts import TrainingBatch
from tests.helpers.masked import mixed_trajectories, with_logprobs
from tests.helpers.reference import load_reference
from tests.helpers.reference import replay as reference_replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False"),
]


@pytest.fixture(scope="module")
def trajectories(qwen3_gqa: Path):
    """As the model itself would have sampled them, in float32 on CPU."""
    reference = load_reference(qwen3_gqa)
    sampled = mixed_trajectories(qwen3_gqa)
    return with_logprobs(sampled, [reference_replay(reference, trajectory) for trajectory in sampled])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_masked_replay_agrees_with_the_cpu_and_the_dense_one_does_not(qwen3_gqa, trajectories, dtype, tolerance):
    report = replay(trajectories, qwen3_gqa, dtype, device="cuda")
    assert report.masked.max <= tolerance
    assert report.dense.max > 1


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_step_on_cuda_equals_the_step_on_cpu(qwen3_gqa, trajectories, zero_stage, ray_cluster):
    import ray

    advantages = np.array([1.0, -0.5, 2.0, -1.0, 0.7, -0.2], np.float32)
    batch = TrainingBatch(trajectories=tuple(trajectories), advantages=advantages, weight_version=0)
    scores, metrics = {}, {}
    for num_gpus in (0, 1):
        # An epsilon above the rounding error of the gradients, which Adam's first step would blow up.
        config = LearnerConfig(
            zero_stage=zero_stage,
            num_gpus=num_gpus,
            optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-3),
        )
        actor = ray.remote(LearnerActor).options(**actor_options(config)).remote(str(qwen3_gqa), config)
        metrics[num_gpus] = ray.get(actor.train_step.remote(batch))
        scores[num_gpus] = np.concatenate(ray.get(actor.score.remote(list(trajectories))))
        ray.kill(actor)
    assert metrics[1]["loss/total"] == pytest.approx(metrics[0]["loss/total"], rel=1e-3, abs=1e-5)
    assert metrics[1]["optimizer/grad_norm"] == pytest.approx(metrics[0]["optimizer/grad_norm"], rel=1e-3)
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-3)

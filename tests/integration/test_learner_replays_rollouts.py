"""vLLM samples under eviction, the learner replays, trains, pushes its weights, and replays again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import ray

from kv_policies.config import DenseConfig, RandomConfig, SnapKVConfig, StreamingLLMConfig
from learner.actor import LearnerActor, actor_options
from learner.config import LearnerConfig, OptimizerConfig
from learner.replay import replay
from orchestration.contracts import TrainingBatch
from tests.helpers.rollout import TOLERANCE, prompt_groups, rollout_engine

POLICIES = {
    "dense": DenseConfig(),
    "snapkv": SnapKVConfig(budget_ratio=0.5, window_tokens=8),
    "streaming_llm": StreamingLLMConfig(budget_tokens=24),
    "random": RandomConfig(budget_ratio=0.3, window_tokens=4),
}
CONFIG = LearnerConfig(
    micro_batch_tokens=256, optimizer=OptimizerConfig(learning_rate=1e-3), weight_bucket_bytes=300_000
)


@pytest.fixture(scope="module")
def start_learner(ray_cluster):
    """start_learner(path) -> actor. A process of its own: vLLM, in this one, tears down torch's process groups."""
    return lambda path: ray.remote(LearnerActor).options(**actor_options(CONFIG)).remote(str(path), CONFIG)


@pytest.mark.parametrize(
    ("model", "policy"),
    [*(("qwen3_gqa", policy) for policy in POLICIES), ("llama_mha_tied", "snapkv")],
)
def test_the_loop_is_exact_before_and_after_a_push(request, start_learner, model, policy):
    path = request.getfixturevalue(model)
    learner = start_learner(path)
    with rollout_engine(path, POLICIES[policy], temperature=0.7) as engine:
        first = list(engine.generate(prompt_groups((1, 2, 30, 61, 97))))
        report = replay(first, path, config=CONFIG)
        assert report.masked.max <= TOLERANCE
        assert (report.dense.max > 0.05) == (policy != "dense")

        advantages = np.resize(np.array([1, -1], np.float32), len(first))
        batch = TrainingBatch(trajectories=tuple(first), advantages=advantages, weight_version=0)
        metrics = ray.get(learner.train_step.remote(batch))
        assert metrics["mismatch/masked_max"] == pytest.approx(report.masked.max, abs=2e-5)
        assert metrics["mismatch/dense_max"] == pytest.approx(report.dense.max, abs=2e-5)

        snapshot = ray.get(learner.publish.remote())
        engine.update_weights(replace(snapshot, buckets=tuple(ray.get(list(snapshot.buckets)))))
        second = list(engine.generate(prompt_groups((40, 80), seed=7)))
    assert {t.weight_versions for t in second} == {(1,)}
    for trajectory, scores in zip(second, ray.get(learner.score.remote(second)), strict=True):
        assert np.abs(scores - trajectory.logprobs).max() <= TOLERANCE
    assert replay(second, path).masked.max > 0.05, "the old weights must not explain the new samples"

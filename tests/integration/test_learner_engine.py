"""The learner on real DeepSpeed, one rank, CPU."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from learner.config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from learner.environment import single_rank_environment
from orchestration.contracts import TrainingBatch, WeightSnapshot
from tests.helpers.masked import masked_trajectory, mixed_trajectories, reference_loss, with_logprobs
from tests.helpers.reference import load_reference, replay, replay_dense
from tests.helpers.tiny_models import build_tiny_tokenizer

ADVANTAGES = np.array([1.0, -0.5, 2.0, -1.0, 0.7, -0.2], np.float32)
CLIP, DISTILLATION, LEARNING_RATE, EPSILON, MAX_NORM = 0.2, 0.3, 1e-2, 1e-3, 0.5


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    """The environment of a learner; the process group that DeepSpeed makes goes with it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in single_rank_environment(LearnerConfig()).items():
            patch.setenv(name, value)
        yield
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()


def make_learner(path, *, total_steps=None, algorithm=None, optimizer=None, **config):
    from learner.engine import Learner

    # An epsilon well above the rounding error of the gradients: Adam's first steps would blow that error up to the
    # size of the learning rate wherever a gradient is near zero.
    adam = dict(learning_rate=LEARNING_RATE, epsilon=EPSILON, max_grad_norm=MAX_NORM) | (optimizer or {})
    objective = dict(clip_ratio=CLIP, distillation_weight=DISTILLATION) | (algorithm or {})
    config = dict(micro_batch_tokens=64, attention_chunk_rows=16, logit_chunk_tokens=5) | config
    return Learner(
        path,
        LearnerConfig(optimizer=OptimizerConfig(**adam), algorithm=AlgorithmConfig(**objective), **config),
        total_steps=total_steps,
    )


def make_batch(trajectories, advantages=ADVANTAGES) -> TrainingBatch:
    return TrainingBatch(trajectories=tuple(trajectories), advantages=advantages, weight_version=0)


def sampled_trajectories(path, *, noise: float = 0.0):
    """As if the model itself had sampled them, up to `noise`."""
    rng, reference = np.random.default_rng(0), load_reference(path)
    trajectories = mixed_trajectories(path)
    return with_logprobs(
        trajectories, [(lp := replay(reference, t)) + rng.normal(0, noise, lp.shape) for t in trajectories]
    )


def plain_training(path, trajectories, *, num_steps: int) -> tuple[PreTrainedModel, list[float], list[float]]:
    """The same steps without DeepSpeed, micro-batches, chunks or packing: model, losses, gradient norms."""
    model = load_reference(path)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    losses, norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = reference_loss(model, trajectories, ADVANTAGES, clip_ratio=CLIP, distillation_weight=DISTILLATION)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def unpack(snapshot: WeightSnapshot) -> dict[str, torch.Tensor]:
    """Parameters by name, from the format alone."""
    weights: dict[str, torch.Tensor] = {}
    digest = hashlib.blake2b(digest_size=16)
    for bucket in snapshot.buckets:
        assert hashlib.blake2b(bucket.data.tobytes(), digest_size=16).hexdigest() == bucket.checksum
        digest.update(bucket.checksum.encode())
        offset = 0
        for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
            raw = torch.from_numpy(bucket.data[offset : offset + size].copy())
            assert name not in weights
            weights[name] = raw.view(getattr(torch, dtype)).view(shape)
            offset += size
        assert offset == bucket.data.size
    assert digest.hexdigest() == snapshot.checksum
    return weights


@pytest.fixture(scope="module", params=["qwen3_gqa", "llama_mha_tied"])
def plain(request):
    """A model, its samples, and what plain PyTorch makes of them in three steps."""
    path = request.getfixturevalue(request.param)
    trajectories = sampled_trajectories(path, noise=0.1)
    return path, trajectories, plain_training(path, trajectories, num_steps=3)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_steps_equal_plain_pytorch(plain, zero_stage, gradient_checkpointing):
    """Weights after three steps within 1e-4 of the distance that they moved; losses and norms to 1e-4."""
    path, trajectories, (model, losses, norms) = plain
    learner = make_learner(path, zero_stage=zero_stage, gradient_checkpointing=gradient_checkpointing)
    metrics = [learner.train_step(make_batch(trajectories)) for _ in range(3)]
    assert [m["loss/total"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    assert [m["optimizer/grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-4)
    assert norms[0] > MAX_NORM, "clipping must be part of what is compared"
    initial = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    trained = unpack(learner.publish())
    expected = dict(model.named_parameters())
    assert trained.keys() == expected.keys()
    for name, weight in expected.items():
        moved = (weight - initial[name]).abs().max()
        assert moved > 1e-3
        assert (trained[name] - weight).abs().max() < 1e-4 * moved, name


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_steps_follow_float32(qwen3_gqa, zero_stage):
    """A learning rate below the resolution of bfloat16 still adds up, in the float32 master weights."""
    trajectories = sampled_trajectories(qwen3_gqa)
    learner = make_learner(
        qwen3_gqa, dtype="bfloat16", zero_stage=zero_stage, optimizer=dict(learning_rate=1e-4, epsilon=1e-8)
    )
    initial = unpack(learner.publish())
    assert all(weight.dtype == torch.bfloat16 for weight in initial.values())
    for _ in range(20):
        metrics = learner.train_step(make_batch(trajectories))
        assert np.isfinite(list(metrics.values())).all()
    trained = unpack(learner.publish())
    moved = {n: (trained[n].float() - initial[n].float()).abs().mean().item() for n in trained if "norm" not in n}
    assert min(moved.values()) > 2e-4, "20 steps of 1e-4; one step rounds to nothing on weights above 0.05"


def test_first_step_is_on_policy(qwen3_gqa):
    """Samples of the same weights: ratios of 1, nothing clipped; the dense gauge sees what the masks hide."""
    trajectories = sampled_trajectories(qwen3_gqa)
    reference = load_reference(qwen3_gqa)
    dense = np.concatenate([np.abs(replay_dense(reference, t) - t.logprobs) for t in trajectories])
    metrics = make_learner(qwen3_gqa).train_step(make_batch(trajectories))
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["mismatch/masked_max"] < 2e-5
    assert metrics["mismatch/dense_mean"] == pytest.approx(dense.mean(), abs=1e-5)
    assert metrics["mismatch/dense_max"] == pytest.approx(dense.max(), abs=1e-4)
    assert metrics["batch/sequences"] == 6 and metrics["batch/response_tokens"] == dense.size


def test_dense_samples_need_no_teacher(qwen3_gqa):
    """Nothing was evicted: both gauges agree and the distillation term is zero."""
    trajectory = masked_trajectory(qwen3_gqa, 20, 6, num_evictions=0)
    metrics = make_learner(qwen3_gqa).train_step(make_batch([trajectory], np.ones(1, np.float32)))
    assert metrics["loss/distillation_kl"] == 0
    assert metrics["mismatch/dense_max"] == metrics["mismatch/masked_max"] > 0


def test_the_gauge_runs_without_distillation_and_can_be_turned_off(qwen3_gqa):
    batch = make_batch(sampled_trajectories(qwen3_gqa))
    gauged = make_learner(qwen3_gqa, algorithm=dict(distillation_weight=0)).train_step(batch)
    assert gauged["mismatch/dense_max"] > 0.1 and gauged["loss/distillation_kl"] > 0
    assert gauged["loss/total"] == gauged["loss/policy"]
    off = make_learner(qwen3_gqa, algorithm=dict(distillation_weight=0, measure_dense=False)).train_step(batch)
    assert "mismatch/dense_max" not in off and "loss/distillation_kl" not in off
    assert off["optimizer/grad_norm"] == pytest.approx(gauged["optimizer/grad_norm"], rel=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_zero_learning_rate_changes_nothing(qwen3_gqa, zero_stage):
    """20 steps, decay included: weights bit-identical, mismatch flat."""
    batch = make_batch(sampled_trajectories(qwen3_gqa))
    learner = make_learner(qwen3_gqa, zero_stage=zero_stage, optimizer=dict(learning_rate=0, weight_decay=0.1))
    before = learner.weights_checksum()
    metrics = [learner.train_step(batch) for _ in range(20)]
    assert learner.weights_checksum() == learner.publish().checksum == before
    assert learner.weight_version == learner.publish().version == 20
    assert max(m["mismatch/masked_max"] for m in metrics) < 2e-5
    assert len({m["mismatch/dense_max"] for m in metrics}) == 1


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_score_equals_the_reference(llama_mha_tied, zero_stage):
    trajectories, reference = mixed_trajectories(llama_mha_tied), load_reference(llama_mha_tied)
    learner = make_learner(llama_mha_tied, zero_stage=zero_stage)
    for masked, expected in ((True, replay), (False, replay_dense)):
        for trajectory, scores in zip(trajectories, learner.score(trajectories, masked=masked), strict=True):
            assert scores.dtype == np.float32
            assert np.abs(scores - expected(reference, trajectory)).max() < 2e-5


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 0.5, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 2 / 3, 1 / 3]),
        ("cosine", [0, 0.5, 1, 0.75, 0.25]),
    ],
)
def test_schedule(qwen3_gqa, schedule, expected):
    batch = make_batch([masked_trajectory(qwen3_gqa, 8, 2)], np.ones(1, np.float32))
    learner = make_learner(qwen3_gqa, total_steps=5, optimizer=dict(schedule=schedule, warmup_steps=2))
    rates = [learner.train_step(batch)["optimizer/learning_rate"] / LEARNING_RATE for _ in range(5)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 2**30])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_snapshot_holds_every_parameter_once(llama_mha_tied, zero_stage, bucket_bytes):
    learner = make_learner(llama_mha_tied, zero_stage=zero_stage, weight_bucket_bytes=bucket_bytes)
    snapshot = learner.publish()
    expected = dict(AutoModelForCausalLM.from_pretrained(llama_mha_tied).named_parameters())
    weights = unpack(snapshot)
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert all(b.data.size <= bucket_bytes or len(b.names) == 1 for b in snapshot.buckets)


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("model", ["qwen3_gqa", "llama_mha_tied"])
def test_saved_folder_reloads(request, tmp_path, model, zero_stage):
    """Plain transformers computes the learner's log-probabilities from it; the tokenizer came along."""
    path = request.getfixturevalue(model)
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(source)
    build_tiny_tokenizer().save_pretrained(source)
    learner = make_learner(source, zero_stage=zero_stage)
    trajectories = sampled_trajectories(source)
    learner.train_step(make_batch(trajectories))
    target = tmp_path / "saved"
    for _ in range(2):  # the second replaces the first
        learner.save_hf(target)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    assert AutoTokenizer.from_pretrained(target).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    reloaded = AutoModelForCausalLM.from_pretrained(target)
    trained = unpack(learner.publish())
    for name, weight in reloaded.named_parameters():
        assert torch.equal(weight, trained[name]), name
    reference = load_reference(target)
    for trajectory, scores in zip(trajectories, learner.score(trajectories), strict=True):
        assert np.abs(scores - replay(reference, trajectory)).max() < 2e-5


def test_refuses_before_it_touches_the_weights(qwen3_gqa):
    learner = make_learner(qwen3_gqa)
    before = learner.weights_checksum()
    trajectory = masked_trajectory(qwen3_gqa, 8, 2)
    with pytest.raises(ValueError, match="at least one response token"):
        learner.train_step(make_batch([], np.zeros(0, np.float32)))
    with pytest.raises(FloatingPointError, match="loss"):
        learner.train_step(make_batch([trajectory], np.full(1, np.nan, np.float32)))
    assert learner.weights_checksum() == before and learner.weight_version == 0
    with pytest.raises(ValueError, match="total_steps"):
        make_learner(qwen3_gqa, optimizer=dict(schedule="cosine"))

"""Preemption, aborts, early ends and refusals: replay stays exact and no block is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kv_policies.config import DenseConfig, SnapKVConfig, StreamingLLMConfig
from orchestration.contracts import PromptGroup
from rollout_workers.config import RolloutConfig, SamplingConfig
from tests.helpers.reference import load_reference, max_delta, replay, replay_dense
from tests.helpers.rollout import TOLERANCE, prompt_groups, rollout_engine

SNAPKV = SnapKVConfig(budget_tokens=32, window_tokens=8)


@pytest.fixture(scope="module")
def model(qwen3_gqa):
    return load_reference(qwen3_gqa)


@pytest.fixture(scope="module")
def engine(qwen3_gqa):
    """Two requests at a time, prefilled in chunks of 16 tokens."""
    with rollout_engine(qwen3_gqa, SNAPKV, max_response_tokens=24, max_num_seqs=2, max_num_batched_tokens=16) as engine:
        yield engine


def assert_exact(model, trajectories) -> None:
    for trajectory in trajectories:
        if trajectory.response_token_ids:
            delta = max_delta(trajectory, replay(model, trajectory))
            assert delta <= TOLERANCE, f"{trajectory.group_id}: {delta}"


@pytest.mark.parametrize("chunk", [256, 13], ids=["whole-prompts", "chunks"])
def test_preempted_requests_are_exact(qwen3_gqa, model, chunk: int) -> None:
    num_blocks, block_bytes = 9, 2 * 3 * 2 * 32 * 4 * 32
    with rollout_engine(
        qwen3_gqa,
        SNAPKV,
        max_response_tokens=60,
        max_model_len=224,
        kv_cache_bytes=num_blocks * block_bytes,
        max_num_batched_tokens=chunk,
        max_num_seqs=6,
    ) as engine:
        trajectories = list(engine.generate(prompt_groups((40, 70, 100, 150), num_samples=2)))
        stats = engine.stats()
    assert stats.num_blocks == num_blocks - 1
    assert stats.num_preemptions > 0
    assert stats.blocks_in_use == 0
    assert len(trajectories) == 8
    assert_exact(model, trajectories)
    assert min(max_delta(t, replay_dense(model, t)) for t in trajectories) > 0.1


def test_response_of_one_token(qwen3_gqa, model) -> None:
    with rollout_engine(qwen3_gqa, SNAPKV, max_response_tokens=1) as engine:
        trajectories = list(engine.generate(prompt_groups((1, 2, 33, 34, 90))))
        assert engine.stats().blocks_in_use == 0
    assert {len(t.response_token_ids) for t in trajectories} == {1}
    assert_exact(model, trajectories)


def test_abort_returns_what_was_sampled(engine, model) -> None:
    groups = prompt_groups((50, 60, 70, 80))
    trajectories = []
    for trajectory in engine.generate(groups):
        if not trajectories:
            engine.abort([groups[1].group_id, groups[3].group_id, "unknown"])
        trajectories.append(trajectory)
    assert len(trajectories) == 8
    aborted = [t for t in trajectories if t.finish_reason == "abort"]
    assert aborted and {t.group_id for t in aborted} <= {groups[1].group_id, groups[3].group_id}
    assert {t.finish_reason for t in trajectories if t.group_id == groups[3].group_id} == {"abort"}
    assert all(not t.mask.events for t in aborted if t.kv.peak_blocks == 0)
    assert_exact(model, trajectories)
    assert engine.stats().blocks_in_use == 0


def test_abort_in_the_middle_of_a_response(engine, model) -> None:
    groups = [*prompt_groups((3,), num_samples=1), *prompt_groups((70,), num_samples=1, seed=5)]
    generation = engine.generate(groups)
    first = next(generation)
    assert first.group_id == groups[0].group_id
    engine.abort([groups[1].group_id])
    (second,) = generation
    assert second.finish_reason == "abort" and 0 < len(second.response_token_ids) < 24
    assert second.mask.events
    assert_exact(model, [first, second])
    assert engine.stats().blocks_in_use == 0


def test_closing_early_frees_everything(engine, model) -> None:
    generation = engine.generate(prompt_groups((50, 60, 70, 80)))
    next(generation)
    assert engine.stats().blocks_in_use > 0
    generation.close()
    assert engine.stats().blocks_in_use == 0
    assert_exact(model, list(engine.generate(prompt_groups((55,)))))


def test_an_exception_frees_everything(engine, model) -> None:
    generation = engine.generate(prompt_groups((50, 60, 70, 80)))
    next(generation)
    with pytest.raises(KeyError):
        generation.throw(KeyError("the consumer failed"))
    assert engine.stats().blocks_in_use == 0
    assert_exact(model, list(engine.generate(prompt_groups((55,)))))


def test_one_generate_at_a_time(engine) -> None:
    first = engine.generate(prompt_groups((50,)))
    next(first)
    with pytest.raises(RuntimeError, match="engine-0: generate: expected no other generate in flight"):
        next(engine.generate(prompt_groups((60,))))
    assert len(list(first)) == 1


def test_prompts_that_do_not_fit_are_refused_before_anything_runs(engine) -> None:
    too_long = PromptGroup(group_id="long", prompt_token_ids=(5,) * 512, num_samples=1)
    with pytest.raises(ValueError, match=r"group long: .*at most 511 tokens \(rollout.max_model_len = 512.*got 512"):
        engine.generate([too_long])
    no_room = PromptGroup(group_id="room", prompt_token_ids=(5,) * 500, num_samples=1)
    with pytest.raises(ValueError, match=r"group room: .*fit rollout.max_model_len = 512, got 500 \+ 24"):
        engine.generate([no_room])
    foreign = PromptGroup(group_id="foreign", prompt_token_ids=(5, 512), num_samples=1)
    with pytest.raises(ValueError, match=r"group foreign: .*\[0, 512\), got 512"):
        engine.generate([foreign])
    assert engine.stats().blocks_in_use == 0


def test_a_generation_config_changes_the_stop_tokens_and_nothing_else(qwen3_gqa, model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen3_gqa, folder)
    stop = list(range(100, 300))
    hostile = {"eos_token_id": stop, "do_sample": True, "top_k": 2, "top_p": 0.1, "temperature": 0.3}
    hostile |= {"repetition_penalty": 5.0, "min_p": 0.5, "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    with rollout_engine(folder, SNAPKV, max_response_tokens=30) as engine:
        trajectories = list(engine.generate(prompt_groups((60,), num_samples=16)))
    assert_exact(model, trajectories)
    assert "stop" in {t.finish_reason for t in trajectories}
    for trajectory in trajectories:
        *before, last = trajectory.response_token_ids
        assert not set(before) & set(stop)
        assert (last in stop) == (trajectory.finish_reason == "stop")
    assert len({t.response_token_ids[0] for t in trajectories}) > 4, "top-k 2 would leave two first tokens"


def test_engines_of_one_process_do_not_see_each_other(qwen3_gqa, model) -> None:
    policies = (SNAPKV, DenseConfig(), StreamingLLMConfig(budget_tokens=16), DenseConfig())
    groups = prompt_groups((40, 90))
    with (
        rollout_engine(qwen3_gqa, policies[0]) as first,
        rollout_engine(qwen3_gqa, policies[1]) as second,
        rollout_engine(qwen3_gqa, policies[2]) as third,
        rollout_engine(qwen3_gqa, policies[3]) as fourth,
    ):
        engines = (first, second, third, fourth)
        generations = [engine.generate(groups) for engine in engines]
        rounds = [[next(generation) for generation in generations] for _ in range(4)]
        for generation in generations:
            assert not list(generation)
        impls = [_attention_impl(engine) for engine in engines]
        assert [engine.stats().blocks_in_use for engine in engines] == [0, 0, 0, 0]
    kept = [sorted(trajectory.kv.context_kept for trajectory in of_one) for of_one in zip(*rounds, strict=True)]
    assert kept == [[32, 32, 32, 32], [39, 39, 89, 89], [16, 16, 16, 16], [39, 39, 89, 89]]
    for trajectories in rounds:
        assert_exact(model, trajectories)
    assert impls[0] == impls[2] == "rollout_workers.sparse_kv.attention.SparseCPUAttentionImpl"
    assert impls[1] == impls[3] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"


def _attention_impl(engine) -> str:
    def qualified_name(worker) -> str:
        impl = type(worker.get_model().model.layers[0].self_attn.attn.impl)
        return f"{impl.__module__}.{impl.__qualname__}"

    return engine._worker_call(qualified_name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler_cls": None}, "sparse KV: not supported together with eviction: scheduler Scheduler"),
        ({"enable_prefix_caching": True}, "sparse KV: not supported together with eviction: prefix caching"),
    ],
    ids=["stock-scheduler", "prefix-caching"],
)
def test_a_worker_whose_hooks_are_not_live_refuses_to_start(qwen3_gqa, change, message: str) -> None:
    from rollout_workers.engine import _build_engine
    from rollout_workers.sparse_kv.options import engine_options

    rollout = RolloutConfig(max_model_len=512, kv_cache_bytes=16 << 20)
    with pytest.raises(ValueError, match=message):
        _build_engine(qwen3_gqa, rollout, SamplingConfig(), engine_options(SNAPKV) | change)

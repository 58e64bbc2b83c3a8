"""Layout of micro-batches, and trajectories that do not fit the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from kv_policies.shadow_mask import NEVER, ShadowMask
from learner.collate import check_fits_model, collate
from orchestration.contracts import KVStats, Trajectory
from tests.helpers.masked import masked_trajectory, mixed_trajectories
from tests.helpers.samples import make_trajectory


def dense_trajectory(num_prompt: int, num_response: int) -> Trajectory:
    num_tokens = num_prompt + num_response
    return Trajectory(
        group_id="g",
        sample_index=0,
        prompt_token_ids=tuple(range(1, num_prompt + 1)),
        response_token_ids=tuple(range(100, 100 + num_response)),
        logprobs=np.zeros(num_response, np.float32),
        temperature=1.0,
        finish_reason="length",
        weight_versions=(0,),
        policy="dense",
        mask=ShadowMask.dense(num_tokens=num_tokens, num_layers=1, num_kv_heads=1),
        kv=KVStats(context_tokens=num_prompt - 1, context_kept=num_prompt - 1, peak_blocks=1, final_blocks=1),
    )


def test_one_sequence_by_hand():
    """P 4, R 2: five inputs; row 3 (the last prompt token) predicts 9, row 4 (the 9) predicts 1."""
    (batch,) = collate([make_trajectory()], np.array([1.5], np.float32), micro_batch_tokens=100, packing=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.output_rows.tolist() == [3, 4]
    assert batch.target_ids.tolist() == [9, 1]
    assert batch.advantages.tolist() == [1.5, 1.5]
    assert batch.temperatures.tolist() == pytest.approx([0.7, 0.7])
    assert batch.evicted_at.tolist() == [[[[NEVER, 3, NEVER, NEVER, NEVER], [3, NEVER, NEVER, NEVER, NEVER]]]]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=12),
    micro_batch_tokens=st.integers(1, 40),
    packing=st.booleans(),
)
def test_every_response_token_once_within_the_limit(lengths, micro_batch_tokens, packing):
    trajectories = [dense_trajectory(*shape) for shape in lengths]
    seen = {}
    for batch in collate(trajectories, micro_batch_tokens=micro_batch_tokens, packing=packing):
        assert batch.input_ids.numel() <= micro_batch_tokens or len(batch.sequences) == 1
        assert packing or batch.input_ids.shape[0] == len(batch.sequences)
        flat_ids, flat_positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        rows = batch.split(batch.output_rows)
        for index, targets in batch.split(batch.target_ids).items():
            trajectory = trajectories[index]
            seen[index] = tuple(targets.tolist())
            # The input of each output row is the token before its target, at the position before it.
            tokens = trajectory.prompt_token_ids + trajectory.response_token_ids
            first = len(trajectory.prompt_token_ids) - 1
            assert tuple(flat_ids[rows[index]].tolist()) == tokens[first:-1]
            assert flat_positions[rows[index]].tolist() == list(range(first, len(tokens) - 1))
    assert seen == {i: t.response_token_ids for i, t in enumerate(trajectories) if t.response_token_ids}


def test_padding_rows_are_a_sequence_of_their_own(qwen3_gqa):
    (batch,) = collate(mixed_trajectories(qwen3_gqa), micro_batch_tokens=10_000, packing=False)
    starts = torch.arange(batch.input_ids.shape[1]) - batch.position_ids
    assert (starts.diff(dim=1) >= 0).all() and (batch.position_ids >= 0).all()


def test_refuses_another_models_trajectories(qwen3_gqa):
    config = AutoConfig.from_pretrained(qwen3_gqa)
    fitting = masked_trajectory(qwen3_gqa, 10, 4)
    check_fits_model([fitting], config)
    for changes, message in [
        (dict(mask=ShadowMask.dense(num_tokens=14, num_layers=2, num_kv_heads=2)), "mask.num_layers: expected 3 .* 2"),
        (
            dict(mask=ShadowMask.dense(num_tokens=14, num_layers=3, num_kv_heads=4)),
            "mask.num_kv_heads: expected 2 .* 4",
        ),
        (dict(response_token_ids=(5, 6, 7, 512)), "token ids: expected below 512 .* 512"),
    ]:
        wrong = replace(fitting, policy="dense", **changes)
        with pytest.raises(ValueError, match=f"g0/0: {message}"):
            check_fits_model([fitting, wrong], config)

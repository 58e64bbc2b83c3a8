"""From trajectories to micro-batches of bounded size, packed or padded by the same code.

The input of a sequence of P prompt and R response tokens is its first T - 1 = P + R - 1 tokens: row P - 1 + t
predicts response token t, and the last response token predicts nothing that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from kv_policies.shadow_mask import NEVER
from orchestration.contracts import Trajectory


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass reads. N rows, S tokens a row, K response tokens (of all its sequences, back to back).

    Example:
        >>> from learner.collate import collate
        >>> collate([], micro_batch_tokens=8, packing=True)
        []
    """

    input_ids: torch.Tensor
    """int64 [N, S]."""
    position_ids: torch.Tensor
    """int64 [N, S], from 0 in every sequence (padding included)."""
    evicted_at: torch.Tensor | None
    """int32 [N, L, H_kv, S] (see `ShadowMask`); None when no sequence lost a key."""
    output_rows: torch.Tensor
    """int64 [K]: index into the N * S rows of the one that predicts each response token."""
    target_ids: torch.Tensor
    """int64 [K]: the response tokens."""
    sampler_logprobs: torch.Tensor
    """float32 [K], nats."""
    temperatures: torch.Tensor
    """float32 [K]."""
    advantages: torch.Tensor
    """float32 [K]: that of the sequence, for each of its tokens."""
    sequences: tuple[tuple[int, int], ...]
    """(index of the trajectory, its number of response tokens), in the order of the K tokens."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy on `device`."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device)
        return MicroBatch(**values)

    def split(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """[K] values by trajectory index."""
        parts = values.split([length for _, length in self.sequences])
        return {index: part for (index, _), part in zip(self.sequences, parts, strict=True)}


def collate(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | None = None,
    *,
    micro_batch_tokens: int,
    packing: bool,
) -> list[MicroBatch]:
    """Lays trajectories out as micro-batches; those without a response token have nothing to predict and are left out.

    Args:
        trajectories: B of them.
        advantages: float32 [B]; zeros if None.
        micro_batch_tokens: most tokens of a micro-batch, padding included; a longer sequence stands alone.
        packing: several sequences in one row; otherwise one a row, padded to the longest.
    """
    if advantages is None:
        advantages = np.zeros(len(trajectories), np.float32)
    lengths = {i: t.num_tokens - 1 for i, t in enumerate(trajectories) if t.response_token_ids}
    layout = _pack(lengths, micro_batch_tokens) if packing else _pad(lengths, micro_batch_tokens)
    return [_build(trajectories, advantages, rows) for rows in layout]


def check_fits_model(trajectories: Sequence[Trajectory], config: PreTrainedConfig) -> None:
    """Refuses trajectories of another model.

    Raises:
        ValueError: naming the trajectory, the field, what was expected and what came.
    """
    num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
    for trajectory in trajectories:
        where = f"Trajectory {trajectory.group_id}/{trajectory.sample_index}"
        for name, expected in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads)):
            got = getattr(trajectory.mask, name)
            if got != expected:
                raise ValueError(f"{where}: mask.{name}: expected {expected} (the model's), got {got}")
        largest = max(trajectory.prompt_token_ids + trajectory.response_token_ids)
        if largest >= config.vocab_size:
            raise ValueError(
                f"{where}: token ids: expected below {config.vocab_size} (the model's vocabulary), got {largest}"
            )


def _pack(lengths: dict[int, int], capacity: int) -> list[list[list[int]]]:
    """First fit, longest first: micro-batches of one row that holds several sequences."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        target = next((b for b, free in enumerate(room) if length <= free), None)
        if target is None:
            bins.append([])
            room.append(capacity)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= length
    return [[row] for row in bins]


def _pad(lengths: dict[int, int], capacity: int) -> list[list[list[int]]]:
    """Longest first: micro-batches of one sequence a row, rows times the longest within the capacity."""
    batches: list[list[list[int]]] = []
    for index in _longest_first(lengths):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0][0]] <= capacity:
            batches[-1].append([index])
        else:
            batches.append([[index]])
    return batches


def _longest_first(lengths: dict[int, int]) -> list[int]:
    return sorted(lengths, key=lambda index: -lengths[index])


def _build(trajectories: Sequence[Trajectory], advantages: np.ndarray, rows: list[list[int]]) -> MicroBatch:
    num_rows = len(rows)
    row_tokens = max(sum(trajectories[i].num_tokens - 1 for i in row) for row in rows)
    mask = trajectories[rows[0][0]].mask
    input_ids = np.zeros((num_rows, row_tokens), np.int64)
    position_ids = np.zeros((num_rows, row_tokens), np.int64)
    evicted_at = None
    if any(trajectories[i].mask.events for row in rows for i in row):
        evicted_at = np.full((num_rows, mask.num_layers, mask.num_kv_heads, row_tokens), NEVER, np.int32)
    output_rows, order = [], []
    for n, row in enumerate(rows):
        start = 0
        for index in row:
            trajectory = trajectories[index]
            length = trajectory.num_tokens - 1
            span = slice(start, start + length)
            input_ids[n, span] = (trajectory.prompt_token_ids + trajectory.response_token_ids)[:-1]
            position_ids[n, span] = np.arange(length)
            if evicted_at is not None and trajectory.mask.events:
                evicted_at[n, :, :, span] = trajectory.mask.evicted_at()[..., :-1]
            first = n * row_tokens + start + len(trajectory.prompt_token_ids) - 1
            output_rows.append(np.arange(first, first + len(trajectory.response_token_ids)))
            order.append(index)
            start += length
        position_ids[n, start:] = np.arange(row_tokens - start)  # padding: one more sequence
    responses = [trajectories[i] for i in order]
    num_response = [len(t.response_token_ids) for t in responses]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        evicted_at=None if evicted_at is None else torch.from_numpy(evicted_at),
        output_rows=torch.from_numpy(np.concatenate(output_rows)),
        target_ids=torch.tensor([token for t in responses for token in t.response_token_ids]),
        sampler_logprobs=torch.from_numpy(np.concatenate([t.logprobs for t in responses])),
        temperatures=torch.tensor([t.temperature for t in responses]).repeat_interleave(torch.tensor(num_response)),
        advantages=torch.from_numpy(np.repeat(advantages[order].astype(np.float32), num_response)),
        sequences=tuple(zip(order, num_response, strict=True)),
    )

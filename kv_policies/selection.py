"""What several policies share: attention of the observation window, and a top-k that always keeps the tail."""

from __future__ import annotations

import torch


def keep_top(scores: torch.Tensor, num_keep: int, num_recent: int) -> torch.Tensor:
    """The `num_keep - num_recent` best-scored keys and the `num_recent` last ones, ascending.

    Args:
        scores: float [H_kv, S - num_recent], one per key before the tail; higher survives. Ties go to the earlier key.
        num_keep: keys kept per head, num_recent <= num_keep <= S.
        num_recent: length of the tail.

    Returns:
        int64 [H_kv, num_keep], strictly ascending in every row.
    """
    num_kv_heads, num_scored = scores.shape
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : num_keep - num_recent].sort(dim=1).values
    tail = torch.arange(num_scored, num_scored + num_recent, device=scores.device)
    return torch.cat([best, tail.expand(num_kv_heads, num_recent)], dim=1)


def window_attention(window_queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal softmax attention of the last W queries over all alive keys, in float32.

    Args:
        window_queries: [W, H, D], the queries of the last W keys' rows, oldest first.
        keys: [H_kv, S, D].
        scale: factor on q.k.

    Returns:
        float32 [H_kv, H / H_kv, W, S].
    """
    num_window, num_heads, head_dim = window_queries.shape
    num_kv_heads, num_alive, _ = keys.shape
    group = num_heads // num_kv_heads
    queries = window_queries.float().permute(1, 0, 2).reshape(num_kv_heads, group * num_window, head_dim)
    logits = (queries @ keys.float().transpose(1, 2)).mul_(scale).view(num_kv_heads, group, num_window, num_alive)
    future = torch.ones(num_window, num_window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., num_alive - num_window :].masked_fill_(future, float("-inf"))
    return logits.softmax(-1)

"""Shadow-masked attention, the `bias` implementation: any mask, exact, in O(chunk x S) memory.

A row of tokens may hold several sequences back to back. Positions restart at 0 in each, so they alone say where a
sequence begins, and row i (the query at index i) sees the key at index j iff

    i - position[i] <= j <= i                    the same sequence, causal
    position[i] < evicted_at[layer, head, j]     not evicted when the row ran

Padding is one more sequence: its rows see each other, nothing sees them, and no softmax is ever empty.

transformers calls the function registered here in every layer; the plan of the forward pass travels as the keyword
`attention_plan` of the model's own forward. Shapes: N rows of tokens, S tokens a row, L layers, H query heads,
H_kv KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "penumbra"
"""The name under which transformers knows this attention (`attn_implementation`)."""


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION, _attention_forward)
    AttentionMaskInterface.register(ATTENTION, _no_attention_mask)


class _Chunk(NamedTuple):
    """Query rows [start, end), which see no key before `first_key` and none from `end` on."""

    start: int
    end: int
    first_key: int


class BiasAttention:
    """The attention plan of one forward pass.

    Args:
        position_ids: int64 [N, S], counting up from 0 in every sequence.
        evicted_at: int32 [N, L, H_kv, S], the position of the first query that no longer sees each key; None for
            plain causal attention.
        chunk_rows: query rows per chunk; changes memory and speed, not the result.
    """

    def __init__(self, position_ids: torch.Tensor, evicted_at: torch.Tensor | None, *, chunk_rows: int) -> None:
        num_tokens = position_ids.shape[1]
        self._positions = position_ids
        self._sequence_starts = torch.arange(num_tokens, device=position_ids.device) - position_ids
        self._evicted_at = evicted_at
        first_keys = self._sequence_starts[:, ::chunk_rows].amin(0).tolist()
        self.chunks = [
            _Chunk(start, min(start + chunk_rows, num_tokens), first_key)
            for start, first_key in zip(range(0, num_tokens, chunk_rows), first_keys, strict=True)
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            layer: 0-based index.
            query: [N, H, S, D], rotated.
            key: [N, H_kv, S, D], rotated.
            value: [N, H_kv, S, D].
            scaling: factor on q.k.

        Returns:
            [N, H, S, D].
        """
        return _ChunkedAttention.apply(query, key, value, self, layer, scaling)

    def visible(self, layer: int, chunk: _Chunk) -> torch.Tensor:
        """bool [N, H_kv or 1, end - start, end - first_key]: the keys that the rows of a chunk see."""
        rows, keys = slice(chunk.start, chunk.end), slice(chunk.first_key, chunk.end)
        index = torch.arange(chunk.end, device=self._positions.device)
        visible = (index[keys] <= index[rows, None]) & (index[keys] >= self._sequence_starts[:, rows, None])
        visible = visible[:, None]
        if self._evicted_at is not None:
            evicted_at = self._evicted_at[:, layer, :, None, keys]
            visible = visible & (self._positions[:, None, rows, None] < evicted_at)
        return visible


class _ChunkedAttention(torch.autograd.Function):
    """Attention chunk by chunk; the backward pass recomputes each chunk, so that only q, k and v are saved."""

    @staticmethod
    def forward(ctx, query, key, value, plan: BiasAttention, layer: int, scaling: float):
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.layer, ctx.scaling = plan, layer, scaling
        output = torch.empty_like(query)
        for chunk in plan.chunks:
            rows, keys = slice(chunk.start, chunk.end), slice(chunk.first_key, chunk.end)
            output[:, :, rows] = _attend_chunk(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], plan.visible(layer, chunk), scaling
            )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        query, key, value = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Keys collect from many chunks: in at least float32, or bfloat16 sums would lose the small ones.
        sum_dtype = torch.promote_types(key.dtype, torch.float32)
        grad_key = torch.zeros_like(key, dtype=sum_dtype)
        grad_value = torch.zeros_like(value, dtype=sum_dtype)
        for chunk in ctx.plan.chunks:
            rows, keys = slice(chunk.start, chunk.end), slice(chunk.first_key, chunk.end)
            q = query[:, :, rows].detach().requires_grad_()
            k = key[:, :, keys].detach().requires_grad_()
            v = value[:, :, keys].detach().requires_grad_()
            with torch.enable_grad():
                output = _attend_chunk(q, k, v, ctx.plan.visible(ctx.layer, chunk), ctx.scaling)
            grads = torch.autograd.grad(output, (q, k, v), grad_output[:, :, rows])
            grad_query[:, :, rows] = grads[0]
            grad_key[:, :, keys] += grads[1]
            grad_value[:, :, keys] += grads[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of C query rows [N, H, C, D] over K keys [N, H_kv, K, D] under `visible` [N, H_kv or 1, C, K].

    The query heads of a KV head share its mask, so they are laid out as more rows of that head: keys and values are
    not repeated, and the fused kernels, which take a mask but no grouped heads, serve.
    """
    num_rows, num_heads, chunk_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    grouped = query.reshape(num_rows, num_kv_heads, group * chunk_rows, head_dim)
    mask = visible if group == 1 else visible.repeat(1, 1, group, 1)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.view(num_rows, num_heads, chunk_rows, head_dim)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    *,
    attention_plan: BiasAttention,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: returns [N, S, H, D] and no weights."""
    output = attention_plan.attend(module.layer_idx, query, key, value, scaling)  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None


def _no_attention_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function: the plan knows the mask, and nothing of S x S elements is built."""

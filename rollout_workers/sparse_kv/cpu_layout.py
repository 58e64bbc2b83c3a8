"""Where vLLM's CPU attention keeps keys and values: permuted inside a block, for the instruction set at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad
from vllm import _custom_ops as ops
from vllm.utils.math_utils import cdiv


@dataclass(frozen=True)
class CPUCacheLayout:
    """A cache [blocks, H_kv, block_size, 2 * D]: per block and head first all keys, then all values, each permuted.

    The permutations are not documented and differ between instruction sets ("vec" moves keys, "amx" values too), so
    they are learnt from the kernel that writes them.
    """

    dtype: torch.dtype
    block_size: int
    head_dim: int
    isa: str
    """Instruction set that vLLM chose for the layer."""

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [2 * block_size * D]: where element (token, dim) of the keys, then of the values, lies in a block."""
        size, dim = self.block_size, self.head_dim
        token = self._probe(torch.arange(size).view(size, 1, 1).expand(size, 1, dim))
        element = self._probe(torch.arange(dim).view(1, 1, dim).expand(size, 1, dim))
        is_value = (torch.arange(2 * size * dim) >= size * dim).long()
        offsets = torch.full((2, size, dim), -1)
        offsets[is_value, token, element] = torch.arange(2 * size * dim)
        if bool((offsets < 0).any()):
            raise RuntimeError(f"sparse KV: the CPU cache layout is not a permutation ({self})")
        return offsets.reshape(-1)

    def read(self, kv_cache: torch.Tensor, blocks: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H_kv, num_slots, D] of the first slots of `blocks` (int64), copied."""
        data = self._flat(kv_cache)[blocks[: cdiv(num_slots, self.block_size)]][..., self.offsets]
        keys, values = data.chunk(2, dim=-1)
        return self._token_major(keys, num_slots), self._token_major(values, num_slots)

    def write(self, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites the first K slots of `blocks` with keys and values [H_kv, K, D]; the last block's rest with 0."""
        num_blocks = cdiv(keys.shape[1], self.block_size)
        ordered = torch.cat([self._block_major(keys, num_blocks), self._block_major(values, num_blocks)], dim=-1)
        data = torch.empty_like(ordered)
        data[..., self.offsets] = ordered
        self._flat(kv_cache)[blocks[:num_blocks]] = data

    def _flat(self, kv_cache: torch.Tensor) -> torch.Tensor:
        return kv_cache.view(*kv_cache.shape[:2], 2 * self.block_size * self.head_dim)

    def _token_major(self, data: torch.Tensor, num_slots: int) -> torch.Tensor:
        num_blocks, num_kv_heads, _ = data.shape
        data = data.reshape(num_blocks, num_kv_heads, self.block_size, self.head_dim).transpose(0, 1)
        return data.reshape(num_kv_heads, num_blocks * self.block_size, self.head_dim)[:, :num_slots]

    def _block_major(self, data: torch.Tensor, num_blocks: int) -> torch.Tensor:
        num_kv_heads, num_slots, _ = data.shape
        data = pad(data, (0, 0, 0, num_blocks * self.block_size - num_slots))
        data = data.view(num_kv_heads, num_blocks, self.block_size, self.head_dim).transpose(0, 1)
        return data.reshape(num_blocks, num_kv_heads, self.block_size * self.head_dim)

    def _probe(self, marks: torch.Tensor) -> torch.Tensor:
        """int64 [2 * block_size * D]: which mark (a small integer, exact in every dtype) lies at each offset."""
        marks = marks.to(self.dtype).contiguous()
        block = torch.zeros(1, 1, 2 * self.block_size, self.head_dim, dtype=self.dtype)
        keys, values = block.chunk(2, dim=2)
        slots = torch.arange(self.block_size)
        ops.cpu_attn_reshape_and_cache(marks, marks, keys, values, slots, self.isa, 1.0, 1.0, "auto")
        return block.reshape(-1).float().round().long()

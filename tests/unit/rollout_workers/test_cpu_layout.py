"""The learnt CPU cache layout against vLLM's own kernels."""

import pytest
import torch
import vllm.v1.worker.cpu_worker  # noqa: F401  loads the CPU kernels
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from rollout_workers.sparse_kv.cpu_layout import CPUCacheLayout

HEADS, BLOCKS = 2, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 32), (32, 64), (64, 80), (32, 128)])
def test_reads_what_the_kernel_wrote_and_writes_as_it_does(dtype, block_size: int, head_dim: int) -> None:
    layout = CPUCacheLayout(dtype, block_size, head_dim, _get_attn_isa(dtype, block_size, head_dim, "auto"))
    num_tokens = 2 * block_size + 7
    blocks = torch.tensor([3, 0, 4])
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, num_tokens, HEADS, head_dim, generator=generator).to(dtype)
    by_kernel = store(layout, keys, values, blocks)
    read_keys, read_values = layout.read(by_kernel, blocks, num_tokens)
    assert torch.equal(read_keys, keys.transpose(0, 1))
    assert torch.equal(read_values, values.transpose(0, 1))

    by_layout = torch.zeros_like(by_kernel)
    layout.write(by_layout, blocks, read_keys, read_values)
    assert torch.equal(by_layout, by_kernel)


def test_writing_touches_only_the_blocks_it_needs() -> None:
    layout = CPUCacheLayout(torch.float32, 32, 32, _get_attn_isa(torch.float32, 32, 32, "auto"))
    cache = torch.full((BLOCKS, HEADS, 32, 64), 7.0)
    layout.write(cache, torch.tensor([3, 0, 4]), torch.ones(HEADS, 33, 32), torch.ones(HEADS, 33, 32))
    assert [bool((cache[block] == 7).all()) for block in range(BLOCKS)] == [False, True, True, False, True]


def store(layout: CPUCacheLayout, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """vLLM's kernel fills slots of `blocks` in order; keys, values: [tokens, heads, D]."""
    cache = torch.zeros(BLOCKS, HEADS, layout.block_size, 2 * layout.head_dim, dtype=layout.dtype)
    key_cache, value_cache = cache.view(BLOCKS, HEADS, 2 * layout.block_size, -1).chunk(2, dim=2)
    position = torch.arange(keys.shape[0])
    slots = blocks[position // layout.block_size] * layout.block_size + position % layout.block_size
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, layout.isa, 1.0, 1.0, "auto")
    return cache

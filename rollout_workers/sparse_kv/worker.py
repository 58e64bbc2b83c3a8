"""The worker of an evicting engine: installs the hooks, and refuses to start unless every one of them is live."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, replace_as
from vllm.v1.worker.cpu_worker import CPUWorker

from rollout_workers.sparse_kv.attention import SparseCPUAttentionImpl, sparse_attention_selected
from rollout_workers.sparse_kv.kv_manager import SparseFullAttentionSpec, register_spec
from rollout_workers.sparse_kv.runner import SparseCPUModelRunner
from rollout_workers.sparse_kv.scheduler import SparseScheduler


class SparseCPUWorker(CPUWorker):
    """vLLM's CPU worker with `SparseCPUModelRunner` and `SparseCPUAttentionImpl`."""

    model_runner: SparseCPUModelRunner

    def init_device(self) -> None:
        self._check_config()
        register_spec()
        super().init_device()
        # CPUWorker hard-codes its runner class. A runner has no weights and no cache yet: building it anew is cheap.
        assert self.device is not None
        self.model_runner = SparseCPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *args, **kwargs) -> None:
        with sparse_attention_selected():
            super().load_model(*args, **kwargs)
        self._check_layers()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        if others := sorted({type(spec).__name__ for spec in specs.values() if type(spec) is not FullAttentionSpec}):
            raise ValueError(f"sparse KV: expected full-attention layers only, got KV cache specs {others}")
        return {name: replace_as(spec, SparseFullAttentionSpec) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        found = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        if found != [SparseFullAttentionSpec]:
            raise RuntimeError(
                "sparse KV: expected one KV cache group of SparseFullAttentionSpec, "
                f"got {[spec.__name__ for spec in found]}: the hook is not live"
            )
        super().initialize_from_config(kv_cache_config)

    def take_kept(self, request_id: str) -> list[tuple[int, np.ndarray]]:
        """(first_row, int64 [L, H_kv, K] kept positions) per eviction of a request; forgets them."""
        return self.model_runner.tracker.take_kept(request_id)

    def peak_buffer_bytes(self) -> int:
        """Most bytes that captured window queries took at one time."""
        return self.model_runner.tracker.peak_buffer_bytes

    def _check_config(self) -> None:
        config, parallel = self.vllm_config, self.vllm_config.parallel_config
        refused = {
            "speculative decoding": config.speculative_config is not None,
            "KV connectors": config.kv_transfer_config is not None,
            "pipeline parallel": parallel.pipeline_parallel_size > 1,
            "tensor parallel": parallel.tensor_parallel_size > 1,
            "context parallel": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
            "prefix caching": config.cache_config.enable_prefix_caching,
            "Model Runner V2": self.use_v2_model_runner,
            "a quantised KV cache": config.cache_config.cache_dtype not in ("auto", "bfloat16", "float32"),
            f"scheduler {config.scheduler_config.get_scheduler_cls().__name__}": not issubclass(
                config.scheduler_config.get_scheduler_cls(), SparseScheduler
            ),
        }
        if found := [name for name, present in refused.items() if present]:
            raise ValueError(f"sparse KV: not supported together with eviction: {', '.join(found)}")

    def _check_layers(self) -> None:
        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, cast(type[Any], AttentionLayerBase))
        for name, layer in layers.items():
            if type(layer) is not Attention:
                raise ValueError(f"sparse KV: layer {name}: expected full attention, got {type(layer).__name__}")
            impl = layer.impl
            if type(impl) is not SparseCPUAttentionImpl:
                raise RuntimeError(
                    f"sparse KV: layer {name}: expected SparseCPUAttentionImpl, got {type(impl).__name__}: "
                    "the hook is not live"
                )
            refused = {
                "sliding window": impl.sliding_window != -1,
                "ALiBi": impl.alibi_slopes is not None,
                "attention sinks": impl.sinks is not None,
                "a logits soft cap": impl.logits_soft_cap != 0,
                "KV sharing between layers": impl.kv_sharing_target_layer_name is not None,
                f"{impl.attn_type} attention": impl.attn_type != AttentionType.DECODER,
            }
            if found := [what for what, present in refused.items() if present]:
                raise ValueError(f"sparse KV: layer {name}: not supported together with eviction: {', '.join(found)}")

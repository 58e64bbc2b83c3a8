"""Model Runner V1 under eviction: slot = position - evicted, while RoPE positions go on counting tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rollout_workers.sparse_kv.eviction import attach_step
from rollout_workers.sparse_kv.options import policy_of
from rollout_workers.sparse_kv.tracker import Eviction, EvictionStep, EvictionTracker, StepRow

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _V1Runner
else:
    _V1Runner = object


class SparseRunnerMixin(_V1Runner):
    """To be mixed into a V1 runner. All state is per runner, so engines of one process do not see each other."""

    tracker: EvictionTracker
    _step: EvictionStep | None = None

    def init_tracker(self, vllm_config: VllmConfig) -> None:
        num_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.tracker = EvictionTracker(policy_of(vllm_config), num_layers)

    def _update_states(self, scheduler_output):
        self.tracker.forget(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens: np.ndarray):
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._shift_slots(num_scheduled_tokens)
        self._step = self.tracker.plan_step(self._step_rows(num_scheduled_tokens))
        return result

    def _build_attention_metadata(self, *args, **kwargs):
        attention_metadata, common_metadata = super()._build_attention_metadata(*args, **kwargs)
        if self._step is not None:
            assert isinstance(attention_metadata, dict), "micro-batches are not supported"
            for metadata in attention_metadata.values():
                attach_step(metadata, self._step)
        return attention_metadata, common_metadata

    @torch.inference_mode()
    def execute_model(self, *args, **kwargs) -> Any:
        try:
            output = super().execute_model(*args, **kwargs)
            if self._step is not None:
                self.tracker.finish_step(self._step)
                for eviction in self._step.evictions:
                    self._truncate_block_table(eviction)
        finally:
            self._step = None
        return output

    def _shift_slots(self, num_scheduled_tokens: np.ndarray) -> None:
        """Rewrites sequence lengths and slots, which super() derived from token counts, in terms of slots."""
        batch, num_reqs = self.input_batch, self.input_batch.num_reqs
        counts = zip(batch.num_computed_tokens_cpu[:num_reqs], batch.num_prompt_tokens[:num_reqs], strict=True)
        evicted = np.array([self.tracker.plan.num_evicted(int(n), int(p)) for n, p in counts], dtype=np.int32)
        if not evicted.any():
            return
        shift = torch.from_numpy(evicted)
        # super() is done with the lengths in tokens: it needed them to know which requests are still prefilling.
        self.optimistic_seq_lens_cpu[:num_reqs] -= shift
        shift = shift.to(self.device)
        self.seq_lens[:num_reqs] -= shift
        num_tokens = int(num_scheduled_tokens.sum())
        token_shift = shift.repeat_interleave(torch.from_numpy(num_scheduled_tokens).to(self.device))
        batch.block_table.compute_slot_mapping(
            num_reqs, self.query_start_loc.gpu[: num_reqs + 1], self.positions[:num_tokens] - token_shift
        )

    def _step_rows(self, num_scheduled_tokens: np.ndarray) -> list[StepRow]:
        starts = np.cumsum(num_scheduled_tokens) - num_scheduled_tokens
        return [
            StepRow(
                request_id=request_id,
                row=row,
                query_start=int(starts[row]),
                num_computed_tokens=int(self.input_batch.num_computed_tokens_cpu[row]),
                num_scheduled_tokens=int(num_scheduled_tokens[row]),
                prompt_token_ids=self.requests[request_id].prompt_token_ids or (),
            )
            for row, request_id in enumerate(self.input_batch.req_ids)
        ]

    def _truncate_block_table(self, eviction: Eviction) -> None:
        """Forgets the tail blocks of a compacted request, as the scheduler will before it plans the next step."""
        row = self.input_batch.req_id_to_index[eviction.request_id]
        tables = self.input_batch.block_table.block_tables
        for table, block_ids in zip(tables, self.requests[eviction.request_id].block_ids, strict=True):
            num_blocks = cdiv(eviction.num_keep, table.block_size)
            table.num_blocks_per_row[row] = num_blocks
            del block_ids[num_blocks:]


class SparseCPUModelRunner(SparseRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner under eviction."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.init_tracker(vllm_config)

"""One vLLM engine in this process: prompts in, trajectories with shadow masks out.

groups --> requests --> [ engine step ] * n --> finished or aborted requests --> Trajectory
                             ^
             weights in between, never while requests are in flight
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason as VLLMFinishReason
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from kv_policies.config import PolicyConfig
from kv_policies.shadow_mask import ShadowMask
from orchestration.contracts import FinishReason, KVStats, PromptGroup, Trajectory, WeightBucket, WeightSnapshot
from rollout_workers.compatibility import check_capacity, check_model, has_tokenizer, stop_token_ids
from rollout_workers.config import RolloutConfig, SamplingConfig
from rollout_workers.environment import apply_environment
from rollout_workers.sparse_kv.kv_manager import BlockUsage
from rollout_workers.sparse_kv.options import engine_options
from rollout_workers.sparse_kv.scheduler import SparseScheduler
from rollout_workers.stats import EngineStats, StepMeter
from rollout_workers.versions import check_versions
from rollout_workers.weights import FetchBucket, expected_shapes, iterate_weights, retie_embeddings, verify_snapshot

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Sample:
    """One request in flight."""

    group: PromptGroup
    index: int
    internal_id: str
    """The id that vLLM's scheduler and worker know it by."""
    num_preemptions: int = 0


class RolloutEngine:
    """Samples groups of responses under a KV policy.

    Not thread safe, with two exceptions: `abort` and `stats` may be called while another thread consumes `generate`.

    Args:
        model_path: HF model folder.
        policy: which keys survive; dense sampling runs vLLM's own classes only.
        rollout: size of the engine.
        sampling: how responses are drawn.
        name: for messages and logs.

    Raises:
        ValueError: the model, the pool or the policy cannot be served; before anything is loaded.
        UnsupportedVersion: of Python, vLLM or torch.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        policy: PolicyConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        name: str = "engine-0",
    ) -> None:
        check_versions()
        self._shape = check_model(model_path)
        check_capacity(self._shape, rollout)
        options = engine_options(policy)
        apply_environment(rollout)
        self.name = name
        self._model_path = Path(model_path)
        self._policy = policy
        self._rollout = rollout
        self._sampling = sampling
        self._llm = _build_engine(self._model_path, rollout, sampling, options)
        self._scheduler = cast(Scheduler, cast(InprocClient, self._llm.engine_core).engine_core.scheduler)
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._tokenizer = self._llm.tokenizer
        self._stop_token_ids = stop_token_ids(model_path, getattr(self._tokenizer, "eos_token_id", None))
        self._samples: dict[str, _Sample] = {}
        self._abort_requested: set[str] = set()
        self._request_numbers = itertools.count()
        self._meter = StepMeter()
        self._weight_version = 0
        self._expected_shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be sampled under."""
        return self._weight_version

    def generate(self, groups: Sequence[PromptGroup]) -> Generator[Trajectory, None, None]:
        """Samples every group and yields each response as it ends.

        Closing the iterator early, or an exception, aborts what is still in flight and frees its blocks.

        Args:
            groups: prompts; `num_samples` responses are drawn of each.

        Yields:
            Trajectories in the order in which they end; aborted ones with finish reason "abort".

        Raises:
            ValueError: a prompt does not fit `rollout.max_model_len` or is not of this model's vocabulary.
            RuntimeError: another `generate` is still running.
        """
        groups = tuple(groups)
        for group in groups:
            self._check_prompt(group)
        return self._generate(groups)

    def abort(self, group_ids: Collection[str]) -> None:
        """Ends all samples of these groups at the next step; ids that are not in flight are ignored."""
        self._abort_requested.update(group_ids)

    def update_weights(self, snapshot: WeightSnapshot, *, fetch: FetchBucket | None = None) -> None:
        """Replaces the weights in place and forgets every cached key that the old ones made.

        All buckets are verified before the first is loaded, so a refused snapshot leaves the old weights serving.

        Args:
            snapshot: the new weights, complete.
            fetch: turns an entry of `snapshot.buckets` into a `WeightBucket`; called twice per bucket, one at a time.

        Raises:
            ValueError: a checksum, name, shape or size is wrong; names this engine and the bucket.
            RuntimeError: requests are in flight.
        """
        if self._samples:
            raise RuntimeError(
                f"{self.name}: update_weights: expected no request in flight, got {len(self._samples)}: "
                "finish or abort them first"
            )
        fetch = fetch or _as_bucket
        if self._expected_shapes is None:
            self._expected_shapes = expected_shapes(self._model_path)
        verify_snapshot(snapshot, self._expected_shapes, fetch, self.name)
        weights = iterate_weights(snapshot, fetch, getattr(torch, self._rollout.dtype))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._llm.collective_rpc(retie_embeddings)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(f"{self.name}: update_weights: KV blocks are in use without a request in flight")
        self._weight_version = snapshot.version
        logger.info("%s: weights version %d", self.name, snapshot.version)

    def stats(self) -> EngineStats:
        """What this engine did since it started."""
        meter, num_blocks = self._meter, self._pool.num_gpu_blocks
        block_bytes = self._shape.kv_bytes_per_token(self._rollout.dtype) * self._rollout.block_size
        return EngineStats(
            num_blocks=num_blocks - 1,  # one is vLLM's null block
            blocks_in_use=self._blocks_in_use(),
            peak_blocks=meter.peak_blocks,
            num_preemptions=meter.num_preemptions,
            max_running=meter.max_running,
            mean_running=meter.mean_running,
            generated_tokens=meter.generated_tokens,
            generate_seconds=meter.generate_seconds,
            kv_capacity_bytes=num_blocks * block_bytes,
            reserved_buffer_bytes=self._worker_call("peak_buffer_bytes") if self._is_sparse else 0,
        )

    def shutdown(self) -> None:
        """Frees the model and the KV pool; the engine cannot be used afterwards."""
        self._llm.engine_core.shutdown()

    @property
    def _is_sparse(self) -> bool:
        return isinstance(self._scheduler, SparseScheduler)

    def _check_prompt(self, group: PromptGroup) -> None:
        num_prompt, limit = len(group.prompt_token_ids), self._rollout.max_model_len
        where = f"{self.name}: group {group.group_id}"
        if num_prompt > limit - 1:
            raise ValueError(
                f"{where}: prompt_token_ids: expected at most {limit - 1} tokens "
                f"(rollout.max_model_len = {limit}, one of them to sample), got {num_prompt}"
            )
        if num_prompt + self._sampling.max_response_tokens > limit:
            raise ValueError(
                f"{where}: expected prompt + sampling.max_response_tokens to fit rollout.max_model_len = {limit}, "
                f"got {num_prompt} + {self._sampling.max_response_tokens}"
            )
        if unknown := [token for token in group.prompt_token_ids if not 0 <= token < self._shape.vocab_size]:
            raise ValueError(
                f"{where}: prompt_token_ids: expected ids in [0, {self._shape.vocab_size}), got {unknown[0]}"
            )

    def _generate(self, groups: tuple[PromptGroup, ...]) -> Generator[Trajectory, None, None]:
        if self._samples:
            raise RuntimeError(f"{self.name}: generate: expected no other generate in flight, got one")
        self._abort_requested.clear()
        try:
            for group in groups:
                for index in range(group.num_samples):
                    self._add_request(group, index)
            while self._samples:
                yield from self._abort_groups()
                yield from self._step()
        finally:
            for sample in self._samples.values():
                self._forget(sample)
            self._samples.clear()

    def _add_request(self, group: PromptGroup, index: int) -> None:
        request_id = f"{self.name}-{next(self._request_numbers)}"
        prompt = tokens_input(list(group.prompt_token_ids))
        internal_id = self._llm.add_request(request_id, prompt, self._sampling_params())
        self._samples[request_id] = _Sample(group=group, index=index, internal_id=internal_id)

    def _sampling_params(self) -> SamplingParams:
        # Everything that decides the distribution is said here: nothing may come from the model's generation config.
        return SamplingParams(
            temperature=self._sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=self._sampling.max_response_tokens,
            stop_token_ids=list(self._stop_token_ids),
            ignore_eos=True,  # stop_token_ids has them all
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _abort_groups(self) -> list[Trajectory]:
        """Ends the samples of groups that `abort` named, with what they have sampled so far."""
        aborted = []
        while self._abort_requested:
            group_id = self._abort_requested.pop()
            for request_id in [r for r, sample in self._samples.items() if sample.group.group_id == group_id]:
                sample = self._samples.pop(request_id)
                state = self._llm.output_processor.request_states[sample.internal_id]
                output = cast(RequestOutput, state.make_request_output([], None, VLLMFinishReason.ABORT, None))
                self._llm.abort_request([sample.internal_id], internal=True)
                aborted.append(self._trajectory(sample, output.outputs[0]))
        return aborted

    def _step(self) -> list[Trajectory]:
        """One engine step; returns what ended in it."""
        started = time.perf_counter()
        outputs = cast(list[RequestOutput], self._llm.step())
        seconds = time.perf_counter() - started
        ended = [self._trajectory(self._samples.pop(output.request_id), output.outputs[0]) for output in outputs]
        self._count_preemptions()
        self._meter.step(
            seconds=seconds,
            num_running=len(self._scheduler.running) + len(ended),
            num_blocks=min(
                self._blocks_in_use() + sum(trajectory.kv.final_blocks for trajectory in ended),
                self._pool.num_gpu_blocks - 1,
            ),
        )
        return ended

    def _count_preemptions(self) -> None:
        # A request that was preempted in a step has not ended in it, so none is missed.
        for sample in self._samples.values():
            found = self._scheduler.requests[sample.internal_id].num_preemptions
            self._meter.num_preemptions += found - sample.num_preemptions
            sample.num_preemptions = found

    def _trajectory(self, sample: _Sample, output: CompletionOutput) -> Trajectory:
        if output.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"{self.name}: group {sample.group.group_id}: vLLM ended it with {output.finish_reason}")
        prompt, response = sample.group.prompt_token_ids, tuple(output.token_ids)
        assert output.logprobs is not None
        logprobs = [at[token].logprob for at, token in zip(output.logprobs, response, strict=True) if at is not None]
        self._meter.generated_tokens += len(response)
        kept, usage = self._take_eviction(sample, len(response))
        num_context = len(prompt) - 1
        return Trajectory(
            group_id=sample.group.group_id,
            sample_index=sample.index,
            prompt_token_ids=prompt,
            response_token_ids=response,
            logprobs=np.array(logprobs, dtype=np.float32),
            temperature=self._sampling.temperature,
            finish_reason=cast(FinishReason, output.finish_reason),
            weight_versions=(self._weight_version,),
            policy=self._policy.type,
            mask=ShadowMask.pack(
                num_tokens=len(prompt) + len(response),
                num_layers=self._shape.num_layers,
                num_kv_heads=self._shape.num_kv_heads,
                kept=kept,
            ),
            kv=KVStats(
                context_tokens=num_context,
                context_kept=kept[0][1].shape[-1] if kept else num_context,
                peak_blocks=usage.peak,
                final_blocks=usage.final,
            ),
            text=self._tokenizer.decode(response, skip_special_tokens=True) if self._tokenizer else "",
            answer=sample.group.answer,
            metadata=sample.group.metadata,
        )

    def _take_eviction(self, sample: _Sample, num_response: int) -> tuple[list[tuple[int, np.ndarray]], BlockUsage]:
        """What an ended request kept, and the blocks that it held; both are forgotten here."""
        if isinstance(self._scheduler, SparseScheduler):
            usage = self._scheduler.take_block_usage(sample.internal_id)
            return self._worker_call("take_kept", sample.internal_id), usage
        # Stock vLLM keeps every token but the last sampled one, which no row has read.
        num_tokens = len(sample.group.prompt_token_ids) + num_response - 1
        num_blocks = cdiv(num_tokens, self._rollout.block_size) if num_response else 0
        return [], BlockUsage(peak=num_blocks, final=num_blocks)

    def _forget(self, sample: _Sample) -> None:
        """Aborts a request that nobody waits for."""
        self._llm.abort_request([sample.internal_id], internal=True)
        self._take_eviction(sample, 0)

    def _blocks_in_use(self) -> int:
        return self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()

    def _worker_call(self, method: str, *args: Any) -> Any:
        (result,) = self._llm.collective_rpc(method, args=args)
        return result


def _build_engine(
    model_path: Path, rollout: RolloutConfig, sampling: SamplingConfig, options: dict[str, Any]
) -> LLMEngine:
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": rollout.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "block_size": rollout.block_size,
        "kv_cache_memory_bytes": rollout.kv_cache_bytes,
        "enable_prefix_caching": True,  # a dense group shares its prompt; an evicting policy overrides this
        "seed": sampling.seed,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature applied
        "generation_config": "vllm",  # ignore the folder's generation_config.json
        "skip_tokenizer_init": not has_tokenizer(model_path),
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    torch.set_num_threads(rollout.num_threads)
    return LLMEngine.from_engine_args(EngineArgs(**(arguments | options)))


def _as_bucket(entry: Any) -> WeightBucket:
    if not isinstance(entry, WeightBucket):
        raise ValueError(f"WeightSnapshot.buckets: expected WeightBuckets, got {type(entry).__name__}")
    return entry

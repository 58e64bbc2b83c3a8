"""Metrics of a run: `metrics.jsonl` for machines, TensorBoard for eyes. Both get the same numbers.

One flat JSON object per line. Line 0 is the evaluation before training; every other line is one step. A metric that
does not apply to a step is absent; a number that is not finite is null.

| name | unit | meaning |
|---|---|---|
| step | | 0 before training, then 1, 2, ... |
| reward/{mean,std,min,max} | | over the scored samples of the step |
| eval/reward_mean, eval/reward_std | | held-out prompts, sampled like the training prompts |
| eval/samples, eval/dropped, time/eval_s | | scored samples, samples without a reward, wall clock |
| samples/requested | | samples asked for |
| samples/scored | | samples that got a reward |
| samples/dropped_reward_error | | the reward function raised |
| samples/dropped_reward_nan | | the reward was not a finite number |
| samples/prompts_skipped | prompts | met so far, too long to leave room for a response |
| samples/dropped_lone | | scored, but alone in its group, so without a baseline |
| samples/aborted | | given up by the engine |
| samples/truncated | | scored, stopped by the token limit |
| rollout/response_tokens | tokens | sampled in this step |
| rollout/tokens_per_s | tokens/s | response_tokens / time/rollout_s |
| rollout/response_length_mean | tokens | |
| rollout/truncated_fraction | | truncated / scored |
| rollout/retained_fraction | | keys kept / keys of the context, mean over samples |
| rollout/sample_final_blocks | blocks | KV blocks that a sample held when it finished, mean over samples |
| rollout/sample_dense_blocks | blocks | what it would have held without eviction, mean over samples |
| rollout/peak_blocks | blocks | most KV blocks in use at once, maximum over engines, since the engines started |
| rollout/num_blocks | blocks | KV blocks of one engine |
| rollout/preemptions | | since the engines started, all engines |
| rollout/max_running | requests | most requests that ran at once, maximum over engines, since the engines started |
| weights/version | | after the step |
| weights/checksum | | of the published weights (JSON only) |
| time/rollout_s | s | sampling and scoring, wall clock |
| time/learner_s | s | the optimiser step, wall clock in the learner |
| time/push_s | s | publishing the weights and loading them into every engine, wall clock |
| time/step_s | s | the whole step without evaluation, wall clock |
| loss/*, policy/*, mismatch/*, optimizer/*, batch/* | | from the learner, see `learner.engine.Learner.train_step` |

`mismatch/masked_*` and `mismatch/dense_*` are |log p learner - log p sampler| per token, in nats, for the forward
under the shadow mask and for the plain forward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestration.sampling import Samples

if TYPE_CHECKING:
    from rollout_workers.stats import EngineStats

MetricValue = float | int | str


class MetricsWriter:
    """Appends one line per step to `metrics.jsonl` and the same numbers to TensorBoard.

    Every line is flushed: a run that is killed keeps all steps it finished.
    """

    def __init__(self, jsonl_path: Path, tensorboard_dir: Path) -> None:
        from tensorboard.summary import Writer  # not torch's: it would load torch into the driver

        self._file = jsonl_path.open("a", encoding="utf-8")
        self._tensorboard = Writer(str(tensorboard_dir))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._tensorboard.close()

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Writes the metrics of one step."""
        self._file.write(to_json_line({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()


def to_json_line(values: Mapping[str, Any]) -> str:
    """Strict JSON: numbers that are not finite become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False)


def sample_metrics(samples: Samples, block_size: int) -> dict[str, MetricValue]:
    """Metrics of the samples of one step; those over scored samples are absent if there are none.

    Args:
        samples: of the step.
        block_size: tokens per KV block.
    """
    metrics: dict[str, MetricValue] = {f"samples/{name}": value for name, value in asdict(samples.counts).items()}
    metrics["time/rollout_s"] = samples.seconds
    scored = samples.trajectories
    if not scored:
        return metrics
    rewards = np.array([t.reward for t in scored], dtype=np.float64)
    lengths = np.array([len(t.response_token_ids) for t in scored])
    cached = np.array([t.num_tokens - 1 for t in scored])  # the last token is sampled, but its key is never computed
    return metrics | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "rollout/response_tokens": int(lengths.sum()),
        "rollout/tokens_per_s": float(lengths.sum() / samples.seconds),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/truncated_fraction": samples.counts.truncated / len(scored),
        "rollout/retained_fraction": float(np.mean([t.kv.retained_fraction for t in scored])),
        "rollout/sample_final_blocks": float(np.mean([t.kv.final_blocks for t in scored])),
        "rollout/sample_dense_blocks": float(np.ceil(cached / block_size).mean()),
    }


def engine_metrics(stats: Sequence[EngineStats]) -> dict[str, MetricValue]:
    """Metrics of all rollout engines."""
    return {
        "rollout/num_blocks": max(s.num_blocks for s in stats),
        "rollout/peak_blocks": max(s.peak_blocks for s in stats),
        "rollout/preemptions": sum(s.num_preemptions for s in stats),
        "rollout/max_running": max(s.max_running for s in stats),
    }

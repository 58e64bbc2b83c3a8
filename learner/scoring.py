"""Log-probabilities of trajectories under a model, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from learner.collate import MicroBatch, collate
from learner.config import LearnerConfig
from orchestration.contracts import Trajectory


@torch.no_grad()
def score(
    forward: Callable[..., dict[str, torch.Tensor]],
    trajectories: Sequence[Trajectory],
    *,
    masked: bool,
    config: LearnerConfig,
    to_device: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> list[np.ndarray]:
    """Scores response tokens, at each trajectory's temperature.

    Args:
        forward: `PolicyModel`, or the DeepSpeed engine around one.
        trajectories: B of them.
        masked: under their shadow masks, or dense.
        config: sizes of micro-batches.
        to_device: moves a micro-batch to where the model is.

    Returns:
        B arrays float32 [R], in the order of the trajectories.
    """
    scores = [np.zeros(0, np.float32) for _ in trajectories]
    for batch in collate(trajectories, micro_batch_tokens=config.micro_batch_tokens, packing=config.packing):
        logprobs = forward(to_device(batch), masked=masked)["logprobs"]
        for index, values in batch.split(logprobs.float().cpu()).items():
            scores[index] = values.numpy()
    return scores

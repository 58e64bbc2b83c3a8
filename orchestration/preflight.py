"""Everything that can be checked before anything heavy starts: each failure is one line that names the setting."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from orchestration.config import RunConfig
from orchestration.placement import plan_bundles
from orchestration.tasks.base import Task

logger = logging.getLogger(__name__)


def check_run(config: RunConfig, *, with_learner: bool = True) -> Task:
    """Checks versions, the model folder, the KV pool, the resources and the task.

    Args:
        config: of the run.
        with_learner: whether the command trains; `penumbra rollout` doesn't.

    Returns:
        The task, its data read and its reward function found.

    Raises:
        ValueError: the first thing that is wrong.
    """
    from rollout_workers.versions import check_versions

    check_versions()
    if with_learner:
        _check_group_size(config)
        _warn_of_two_precisions(config)
    check_resources(config, with_learner=with_learner)
    vocab_size = check_model_folder(config, with_learner=with_learner)

    from transformers import AutoTokenizer

    from orchestration.tasks.build import build_task

    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.path: expected a vocab_size of at least {len(tokenizer)} (the tokenizer's tokens) in "
            f"{config.model.path}, got {vocab_size}"
        )
    return build_task(config, tokenizer)


def _check_group_size(config: RunConfig) -> None:
    if config.sampling.group_size < 2:
        raise ValueError(
            f"sampling.group_size: expected at least 2 to train ({config.learner.algorithm.type} compares the samples "
            f"of a prompt with each other), got {config.sampling.group_size}"
        )


def check_model_folder(config: RunConfig, *, with_learner: bool) -> int:
    """Raises ValueError unless the folder holds a model that both sides can run, its weights and a tokenizer; returns
    the size of its vocabulary."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path: expected a Hugging Face model folder, there is none at {folder} "
            "(`penumbra model tiny` and `penumbra model smollm2` make one)"
        )
    from rollout_workers.compatibility import check_capacity, check_model, has_tokenizer

    shape = check_model(folder)
    if with_learner:
        from learner.model import check_model as check_trainable

        check_trainable(folder)
    _check_weights(folder)
    if not has_tokenizer(folder):
        raise ValueError(
            f"model.path: expected a tokenizer (tokenizer.json, tokenizer.model or vocab.json) in {folder}, got none"
        )
    check_capacity(shape, config.rollout)
    return shape.vocab_size


def _check_weights(folder: Path) -> None:
    """Reads the headers only: a file that was cut short is found, a wrong number is not."""
    from safetensors import SafetensorError, safe_open

    shards = sorted(folder.glob("*.safetensors"))
    if not shards and not any(folder.glob("pytorch_model*.bin")):
        raise ValueError(f"model.path: expected weights (*.safetensors or pytorch_model*.bin) in {folder}, got none")
    for shard in shards:
        try:
            with safe_open(shard, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"model.path: expected whole weights, {shard} is damaged: {error}") from None


def check_resources(config: RunConfig, *, with_learner: bool) -> None:
    """Raises ValueError if a private Ray on this machine could not hold the actors.

    A cluster that already exists (RAY_ADDRESS) is asked when the run connects to it.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    import torch

    bundles = plan_bundles(config, with_learner=with_learner)
    for kind, asked, present in (
        ("cpus", sum(bundle.num_cpus for bundle in bundles), os.cpu_count() or 1),
        ("gpus", sum(bundle.num_gpus for bundle in bundles), torch.cuda.device_count()),
    ):
        if asked > present:
            fields = f"rollout.num_engines * rollout.num_{kind}_per_engine"
            if with_learner:
                fields = f"learner.num_{kind} + {fields}"
            raise ValueError(
                f"{fields}: expected at most {present} (the {kind[:3].upper()}s of this machine), got {asked:g}"
            )


def _warn_of_two_precisions(config: RunConfig) -> None:
    if config.rollout.dtype != config.learner.dtype:
        logger.warning(
            "rollout.dtype = %s and learner.dtype = %s: sampler and learner will disagree by rounding alone; "
            "the mismatch metrics show by how much",
            config.rollout.dtype,
            config.learner.dtype,
        )

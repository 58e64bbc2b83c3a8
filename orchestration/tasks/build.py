"""From a run's configuration to its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestration.config import RunConfig
from orchestration.tasks.base import Task, TaskSettings
from orchestration.tasks.config import JsonlConfig, NeedleConfig, ReasoningGymConfig, TaskConfig
from orchestration.tasks.jsonl import JsonlTask
from orchestration.tasks.needle import NeedleTask
from orchestration.tasks.reasoning_gym import ReasoningGymTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_task(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that `config.task` describes.

    Args:
        config: of the run.
        tokenizer: of the model that will be trained.

    Raises:
        ValueError: the task can't be made; names the setting.
    """
    settings = TaskSettings(
        seed=config.run.seed,
        group_size=config.sampling.group_size,
        eval_samples_per_prompt=config.run.eval_samples_per_prompt,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    task = _make_task(config.task, settings, tokenizer)
    # A task that has no usable prompt says so now and not once the engines are up.
    task.train_groups(0, 1)
    if config.run.eval_prompts:
        task.eval_groups(1)
    return task


def _make_task(config: TaskConfig, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Task:
    match config:
        case NeedleConfig():
            return NeedleTask(config, settings, tokenizer)
        case ReasoningGymConfig():
            return ReasoningGymTask(config, settings, tokenizer)
        case JsonlConfig():
            return JsonlTask(config, settings, tokenizer)

"""From a run's configuration to its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestration.config import RunConfig
from orchestration.tasks.base import Task, TaskSettings
from orchestration.tasks.config import JsonlConfig, NeedleConfig, ReasoningGymConfig
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
    match config.task:
        case NeedleConfig():
            return NeedleTask(config.task, settings, tokenizer)
        case ReasoningGymConfig():
            return ReasoningGymTask(config.task, settings, tokenizer)
        case JsonlConfig():
            return JsonlTask(config.task, settings, tokenizer)

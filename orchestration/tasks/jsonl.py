"""Rows of a JSON Lines file: the user's own prompts, answers and reward function."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestration.contracts import PromptGroup, Trajectory
from orchestration.tasks.base import Prompt, PromptBuilder, TaskSettings, prompt_digest
from orchestration.tasks.config import JsonlConfig
from orchestration.tasks.rewards import load_reward

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class JsonlTask:
    """Prompts in an order that is shuffled anew each epoch; held-out prompts by a hash, or from a file of their own.

    Everything is read, tokenised and checked when the task is made, before anything heavy starts.

    Raises:
        ValueError: a file that is missing, not JSON Lines or empty, a column that it lacks, a row that can't be used,
            a reward function that can't be called, or no prompt that is short enough.
    """

    def __init__(self, config: JsonlConfig, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._num_skipped = 0
        self._reward = load_reward(config.reward)
        reader = _Reader(config, PromptBuilder(tokenizer, config))
        prompts = self._short_enough(reader.read(config.path, "task.path"), config.path)
        if config.eval_path is not None:
            self._train = prompts
            self._eval = self._short_enough(reader.read(config.eval_path, "task.eval_path"), config.eval_path)
        else:
            limit = config.eval_fraction * 2**64
            held_out = [int.from_bytes(prompt_digest(settings.seed, p)[:8], "big") < limit for p in prompts]
            self._train = [p for p, out in zip(prompts, held_out, strict=True) if not out]
            self._eval = [p for p, out in zip(prompts, held_out, strict=True) if out]
        if not self._train:
            raise ValueError(
                f"task.path, task.eval_fraction: expected at least 1 prompt of {config.path} left to train on, "
                f"all {len(prompts)} are held out"
            )

    @property
    def num_skipped(self) -> int:
        """See `Task.num_skipped`."""
        return self._num_skipped

    def train_groups(self, step: int, num_groups: int) -> list[PromptGroup]:
        """See `Task.train_groups`."""
        first = step * num_groups
        return [
            self._at(position).group(f"step{step}-{position - first}", self._settings.group_size)
            for position in range(first, first + num_groups)
        ]

    def eval_groups(self, num_groups: int) -> list[PromptGroup]:
        """See `Task.eval_groups`."""
        return [
            prompt.group(f"eval-{index}", self._settings.eval_samples_per_prompt)
            for index, prompt in enumerate(self._eval[:num_groups])
        ]

    def reward(self, trajectory: Trajectory) -> float:
        """See `Task.reward`."""
        return self._reward(response=trajectory.text, answer=trajectory.answer, metadata=trajectory.metadata)

    def _at(self, position: int) -> Prompt:
        """The prompt at a place of the endless training order."""
        epoch, place = divmod(position, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"{self._settings.seed}/epoch-{epoch}").shuffle(order)
        return self._train[order[place]]

    def _short_enough(self, prompts: list[Prompt], path: str) -> list[Prompt]:
        limit = self._settings.max_prompt_tokens
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        skipped = len(prompts) - len(kept)
        if skipped:
            logger.warning(
                "%s: %d of %d prompts are longer than %d tokens (rollout.max_model_len - "
                "sampling.max_response_tokens) and are skipped",
                path,
                skipped,
                len(prompts),
                limit,
            )
        if not kept:
            raise ValueError(
                f"task: expected a prompt of at most {limit} tokens in {path} (rollout.max_model_len - "
                f"sampling.max_response_tokens), the shortest has {min(len(p.token_ids) for p in prompts)}"
            )
        self._num_skipped += skipped
        return kept


class _Reader:
    """Turns the rows of a file into prompts."""

    def __init__(self, config: JsonlConfig, builder: PromptBuilder) -> None:
        self._config = config
        self._builder = builder

    def read(self, path: str, field: str) -> list[Prompt]:
        rows = _load(path, field)
        column = self._prompt_column(rows.column_names, path)
        return [self._prompt(row, column, f"{path}: row {number}") for number, row in enumerate(rows, start=1)]

    def _prompt_column(self, columns: Sequence[str], path: str) -> str:
        config = self._config
        found = ", ".join(columns)
        if config.answer_column not in columns:
            raise ValueError(f"task.answer_column: expected {config.answer_column!r} in {path}, it has {found}")
        for column in (config.prompt_column, config.messages_column):
            if column in columns:
                return column
        raise ValueError(
            f"task.prompt_column, task.messages_column: expected {config.prompt_column!r} or "
            f"{config.messages_column!r} in {path}, it has {found}"
        )

    def _prompt(self, row: Mapping[str, Any], column: str, where: str) -> Prompt:
        content = row[column]
        if column == self._config.prompt_column:
            if not isinstance(content, str):
                raise ValueError(f"{where}: {column}: expected text, got {type(content).__name__}")
            token_ids = self._builder.from_question(content)
        else:
            if not _is_chat(content):
                raise ValueError(
                    f'{where}: {column}: expected a list of {{"role": ..., "content": ...}}, got {content!r:.80}'
                )
            token_ids = self._builder.from_messages(content)
        if not token_ids:
            raise ValueError(f"{where}: {column}: expected at least 1 token, got none")
        used = {column, self._config.answer_column}
        metadata = {name: value for name, value in row.items() if name not in used}
        return Prompt(token_ids=token_ids, answer=row[self._config.answer_column], metadata=metadata)


def _load(path: str, field: str) -> Dataset:
    """The rows of a file, in memory: nothing stays in the user's cache folder."""
    from datasets import Dataset, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    if not Path(path).is_file():
        raise ValueError(f"{field}: expected a JSON Lines file, there is none at {path}")
    if Path(path).stat().st_size == 0:
        raise ValueError(f"{field}: expected at least 1 row in {path}, got none")
    disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="penumbra-jsonl-") as cache:
        try:
            rows = Dataset.from_json(path, cache_dir=cache, keep_in_memory=True)
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            raise ValueError(f"{field}: {path} is not JSON Lines with one type a column: {cause}") from error
    assert isinstance(rows, Dataset)
    if not len(rows):
        raise ValueError(f"{field}: expected at least 1 row in {path}, got none")
    return rows


def _is_chat(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in content)
    )

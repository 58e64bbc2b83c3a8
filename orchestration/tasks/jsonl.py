"""Rows of a JSON Lines file: the user's own prompts, answers and reward function."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestration.contracts import PromptGroup, Trajectory
from orchestration.tasks.base import Prompt, PromptBuilder, TaskSettings, prompt_digest
from orchestration.tasks.config import JsonlConfig
from orchestration.tasks.rewards import load_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class JsonlTask:
    """Prompts in an order that is shuffled anew each epoch; held out are some of the distinct prompts, or a file.

    Everything is read, tokenised and checked when the task is made, before anything heavy starts.

    Raises:
        ValueError: a file that is missing, not JSON Lines or empty, a column that it lacks, a row that can't be used,
            a reward function that can't be called, or no prompt that is short enough.
    """

    def __init__(self, config: JsonlConfig, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._num_skipped = 0
        self._reward = load_reward(config.reward)
        builder = PromptBuilder(tokenizer, config)
        prompts = self._short_enough(_read_prompts(config.path, "task.path", config, builder), config.path)
        if config.eval_path is not None:
            evaluation = _read_prompts(config.eval_path, "task.eval_path", config, builder)
            self._eval = self._short_enough(evaluation, config.eval_path)
        else:
            self._eval = _hold_out(prompts, config.eval_fraction, settings.seed)
        held_out = {prompt.token_ids for prompt in self._eval}
        self._train = [prompt for prompt in prompts if prompt.token_ids not in held_out]
        if not self._train:
            raise ValueError(f"task.path, task.eval_path: every prompt of {config.path} is also in {config.eval_path}")

    @property
    def num_skipped(self) -> int:
        """See `Task.num_skipped`."""
        return self._num_skipped

    def train_groups(self, step: int, num_groups: int) -> list[PromptGroup]:
        """See `Task.train_groups`."""
        size = len(self._train)
        first = step * num_groups
        epochs = range(first // size, (first + num_groups - 1) // size + 1)
        orders = {epoch: self._order(epoch) for epoch in epochs}
        prompts = [self._train[orders[place // size][place % size]] for place in range(first, first + num_groups)]
        return [prompt.group(f"step{step}-{i}", self._settings.group_size) for i, prompt in enumerate(prompts)]

    def eval_groups(self, num_groups: int) -> list[PromptGroup]:
        """See `Task.eval_groups`."""
        return [
            prompt.group(f"eval-{index}", self._settings.eval_samples_per_prompt)
            for index, prompt in enumerate(self._eval[:num_groups])
        ]

    def reward(self, trajectory: Trajectory) -> float:
        """See `Task.reward`."""
        return self._reward(response=trajectory.text, answer=trajectory.answer, metadata=trajectory.metadata)

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._settings.seed}/epoch-{epoch}").shuffle(order)
        return order

    def _short_enough(self, prompts: list[Prompt], path: str) -> list[Prompt]:
        limit = self._settings.max_prompt_tokens
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        if not kept:
            raise ValueError(
                f"task: expected a prompt of at most {limit} tokens in {path} (rollout.max_model_len - "
                f"sampling.max_response_tokens), the shortest has {min(len(p.token_ids) for p in prompts)}"
            )
        if len(kept) < len(prompts):
            logger.warning(
                "%s: %d of %d prompts are longer than %d tokens (rollout.max_model_len - "
                "sampling.max_response_tokens) and are skipped",
                path,
                len(prompts) - len(kept),
                len(prompts),
                limit,
            )
        self._num_skipped += len(prompts) - len(kept)
        return kept


def _hold_out(prompts: Sequence[Prompt], fraction: float, seed: int) -> list[Prompt]:
    """A share of the distinct prompts, rounded up, in random order; at least one prompt is always left."""
    distinct = list({prompt.token_ids: prompt for prompt in prompts}.values())
    distinct.sort(key=lambda prompt: prompt_digest(seed, prompt))
    return distinct[: min(math.ceil(fraction * len(distinct)), len(distinct) - 1)]


@dataclass(frozen=True)
class _Row:
    where: str
    """File and line, for messages."""
    columns: Mapping[str, Any]


def _read_prompts(path: str, field: str, config: JsonlConfig, builder: PromptBuilder) -> list[Prompt]:
    rows = list(_read_rows(path, field))
    if not rows:
        raise ValueError(f"{field}: expected at least 1 row in {path}, got none")
    found = list(dict.fromkeys(name for row in rows for name in row.columns))
    if config.answer_column not in found:
        raise ValueError(f"task.answer_column: expected {config.answer_column!r} in {path}, it has {', '.join(found)}")
    if config.prompt_column in found:
        return [_prompt_of_text(row, config, builder) for row in rows]
    if config.messages_column in found:
        return [_prompt_of_messages(row, config, builder) for row in rows]
    raise ValueError(
        f"task.prompt_column, task.messages_column: expected {config.prompt_column!r} or {config.messages_column!r} "
        f"in {path}, it has {', '.join(found)}"
    )


def _read_rows(path: str, field: str) -> Iterator[_Row]:
    """The objects of the file as they are written there: a reader that gives every column one type would turn answers
    that look like dates into dates and fill nested objects up with nulls."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{field}: can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path}: expected UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            columns = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{field}: {where}: not JSON: {error}") from None
        if not isinstance(columns, dict):
            raise ValueError(f"{field}: {where}: expected a JSON object, got {line:.80}")
        yield _Row(where, columns)


def _prompt_of_text(row: _Row, config: JsonlConfig, builder: PromptBuilder) -> Prompt:
    text = _column(row, config.prompt_column)
    if not isinstance(text, str):
        raise ValueError(f"{row.where}: {config.prompt_column}: expected text, got {text!r:.80}")
    if not text.strip():
        raise ValueError(
            f"{row.where}: {config.prompt_column}: expected a prompt of at least 1 token, got {text!r:.80}"
        )
    return _prompt(row, config.prompt_column, builder.from_question(text), config)


def _prompt_of_messages(row: _Row, config: JsonlConfig, builder: PromptBuilder) -> Prompt:
    chat = _column(row, config.messages_column)
    if not _is_chat(chat):
        raise ValueError(
            f"{row.where}: {config.messages_column}: expected a list of objects with role and content, got {chat!r:.80}"
        )
    return _prompt(row, config.messages_column, builder.from_messages(chat), config)


def _prompt(row: _Row, column: str, token_ids: tuple[int, ...], config: JsonlConfig) -> Prompt:
    if not token_ids:
        raise ValueError(f"{row.where}: {column}: expected a prompt of at least 1 token, got none")
    used = {column, config.answer_column}
    metadata = {name: value for name, value in row.columns.items() if name not in used}
    return Prompt(token_ids=token_ids, answer=_column(row, config.answer_column), metadata=metadata)


def _column(row: _Row, name: str) -> Any:
    if name not in row.columns:
        raise ValueError(f"{row.where}: expected a column {name!r}, it has {', '.join(row.columns)}")
    return row.columns[name]


def _is_chat(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in content)
    )

"""What a task is, and how text becomes the token ids of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orchestration.contracts import PromptGroup, Trajectory
from orchestration.tasks.config import PromptConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Task(Protocol):
    """Where prompts come from and how responses are scored."""

    @property
    def num_skipped(self) -> int:
        """Prompts met so far that were dropped because they leave no room for a whole response."""
        ...

    def train_groups(self, step: int, num_groups: int) -> list[PromptGroup]:
        """The prompts of one training step.

        A pure function of the run's seed and the arguments: a run that is resumed goes on with the same prompts.

        Args:
            step: 0-based training step.
            num_groups: how many; the same number in every step of a run.
        """
        ...

    def eval_groups(self, num_groups: int) -> list[PromptGroup]:
        """At most `num_groups` held-out prompts, always the same ones; none of them is ever trained on.

        Fewer come back where the task holds out fewer.
        """
        ...

    def reward(self, trajectory: Trajectory) -> float:
        """The score of one response. May raise, or return NaN: the caller counts and drops such a sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What every task needs to know of the run."""

    seed: int
    group_size: int
    """Samples per training prompt."""
    eval_samples_per_prompt: int
    max_prompt_tokens: int
    """Longer prompts leave no room for a whole response."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a task, before it is asked for a number of samples."""

    token_ids: tuple[int, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def group(self, group_id: str, num_samples: int) -> PromptGroup:
        """The prompt as rollout workers take it."""
        return PromptGroup(
            group_id=group_id,
            prompt_token_ids=self.token_ids,
            num_samples=num_samples,
            answer=self.answer,
            metadata=self.metadata,
        )


def prompt_digest(seed: int, prompt: Prompt) -> bytes:
    """16 bytes that depend on the seed and the prompt's tokens alone: decides which prompts are held out."""
    return hashlib.blake2b(f"{seed}:{prompt.token_ids}".encode(), digest_size=16).digest()


class PromptBuilder:
    """Text to prompt token ids, once: from here on ids travel, and nothing is tokenised again.

    Args:
        tokenizer: of the model that will be trained.
        config: chat template, system prompt and prompt template.

    Raises:
        ValueError: the chat template is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        if config.apply_chat_template and not tokenizer.chat_template:
            raise ValueError(
                f"task.apply_chat_template: expected a tokenizer with a chat template, {tokenizer.name_or_path} has "
                "none; set task.apply_chat_template = false to send prompts as plain text"
            )
        self._tokenizer = tokenizer
        self._config = config

    def from_question(self, question: str) -> tuple[int, ...]:
        """Token ids of one question, in the prompt template and, if so configured, as a user message."""
        text = self._config.prompt_template.replace("{question}", question)
        if not self._config.apply_chat_template:
            return self.from_text(text)
        return self.from_messages([{"role": "user", "content": text}])

    def from_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a chat, up to where the assistant's turn begins. The configured system prompt goes first,
        unless the chat brings its own."""
        chat = [dict(message) for message in messages]
        if self._config.system_prompt is not None and (not chat or chat[0]["role"] != "system"):
            chat.insert(0, {"role": "system", "content": self._config.system_prompt})
        # The template writes the special tokens itself: tokenising its text with them again would double the BOS.
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def from_text(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, after the tokenizer's BOS where it has one and the text doesn't begin with it."""
        bos = self._tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        return tuple(self._tokenizer(text, add_special_tokens=not has_bos)["input_ids"])

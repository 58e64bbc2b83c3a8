"""Tasks whose prompts are drawn from a generator, without end."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

from orchestration.contracts import PromptGroup, Trajectory
from orchestration.tasks.base import Prompt, TaskSettings, prompt_digest

logger = logging.getLogger(__name__)

_MAX_REJECTED_DRAWS = 2_000
"""Draws in a row that may be refused before the generator is taken to have nothing to offer."""


class ProceduralTask(ABC):
    """Draws prompts at random, by a random state that depends on (seed, step) only.

    Which prompts are held out is decided by a hash of their token ids, so the split needs no list of prompts, and a
    prompt that the generator happens to draw twice falls on the same side both times.

    Args:
        settings: seed, samples per prompt, longest prompt.
        eval_fraction: share of the distinct prompts that is held out.
    """

    def __init__(self, settings: TaskSettings, *, eval_fraction: float) -> None:
        self._settings = settings
        self._eval_fraction = eval_fraction
        self._too_long: set[bytes] = set()

    @abstractmethod
    def draw(self, rng: random.Random) -> Prompt:
        """One prompt of the task."""

    @abstractmethod
    def reward(self, trajectory: Trajectory) -> float:
        """See `Task.reward`."""

    @property
    def num_skipped(self) -> int:
        """See `Task.num_skipped`."""
        return len(self._too_long)

    def train_groups(self, step: int, num_groups: int) -> list[PromptGroup]:
        """See `Task.train_groups`."""
        prompts = self._draws(f"train-{step}", held_out=False)
        return [next(prompts).group(f"step{step}-{index}", self._settings.group_size) for index in range(num_groups)]

    def eval_groups(self, num_groups: int) -> list[PromptGroup]:
        """See `Task.eval_groups`. Distinct prompts; fewer than asked for where the generator has only few."""
        distinct: dict[tuple[int, ...], Prompt] = {}
        prompts = self._draws("eval", held_out=True)
        for _ in range(4 * num_groups):
            if len(distinct) == num_groups:
                break
            prompt = next(prompts)
            distinct.setdefault(prompt.token_ids, prompt)
        return [
            prompt.group(f"eval-{index}", self._settings.eval_samples_per_prompt)
            for index, prompt in enumerate(distinct.values())
        ]

    def _draws(self, stream: str, *, held_out: bool) -> Iterator[Prompt]:
        """Prompts of one side of the split, those that are too long left out."""
        rng = random.Random(f"{self._settings.seed}/{stream}")
        rejected = 0
        while rejected < _MAX_REJECTED_DRAWS:
            prompt = self.draw(rng)
            if len(prompt.token_ids) > self._settings.max_prompt_tokens:
                self._skip(prompt)
            elif self._is_held_out(prompt) == held_out:
                rejected = 0
                yield prompt
                continue
            rejected += 1
        use = "evaluation" if held_out else "training"
        raise ValueError(
            f"task: {_MAX_REJECTED_DRAWS} prompts in a row could not be used for {use}: "
            f"{self.num_skipped} were longer than rollout.max_model_len - sampling.max_response_tokens = "
            f"{self._settings.max_prompt_tokens} tokens, the others fell on the other side of the held-out split"
        )

    def _is_held_out(self, prompt: Prompt) -> bool:
        digest = prompt_digest(self._settings.seed, prompt)
        return int.from_bytes(digest[:8], "big") < self._eval_fraction * 2**64

    def _skip(self, prompt: Prompt) -> None:
        if not self._too_long:
            logger.warning(
                "prompts longer than %d tokens (rollout.max_model_len - sampling.max_response_tokens) are skipped; "
                "the first has %d",
                self._settings.max_prompt_tokens,
                len(prompt.token_ids),
            )
        self._too_long.add(prompt_digest(self._settings.seed, prompt))

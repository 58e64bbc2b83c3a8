"""Needle recall: value tokens hidden among filler tokens, to be repeated in order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.contracts import Trajectory
from orchestration.tasks.base import Prompt, TaskSettings
from orchestration.tasks.config import NeedleConfig
from orchestration.tasks.procedural import ProceduralTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
VALUES = tuple(f"value_{index}" for index in range(8))
FILLERS = tuple(f"filler_{index}" for index in range(8))

_EVAL_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class NeedleVocabulary:
    """Token ids of the words that the task is made of."""

    user: int
    assistant: int
    end: int
    values: tuple[int, ...]
    fillers: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> NeedleVocabulary:
        """Looks the words up.

        Raises:
            ValueError: the tokenizer doesn't have them.
        """
        vocabulary = tokenizer.get_vocab()
        missing = [word for word in (USER, ASSISTANT, END, *VALUES, *FILLERS) if word not in vocabulary]
        if missing:
            raise ValueError(
                "task.type: the needle task expects the tokenizer of the embedded tiny model (penumbra model tiny); "
                f"that of {tokenizer.name_or_path} lacks {len(missing)} of its words, {missing[0]!r} first"
            )
        return cls(
            user=vocabulary[USER],
            assistant=vocabulary[ASSISTANT],
            end=vocabulary[END],
            values=tuple(vocabulary[word] for word in VALUES),
            fillers=tuple(vocabulary[word] for word in FILLERS),
        )


def draw_needles(
    config: NeedleConfig, vocabulary: NeedleVocabulary, rng: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One prompt (what the tiny model's chat template makes of one user message) and its answer, both token ids."""
    length = rng.randint(config.shortest_filler_tokens, config.num_filler_tokens)
    text = rng.choices(vocabulary.fillers, k=length)
    answer = tuple(rng.choices(vocabulary.values, k=config.num_needles))
    for position, value in zip(sorted(rng.sample(range(length), config.num_needles)), answer, strict=True):
        text[position] = value
    return (vocabulary.user, *text, vocabulary.assistant), answer


class NeedleTask(ProceduralTask):
    """Reward: the fraction of positions that are right among the needles, in order, and the stop token after them."""

    def __init__(self, config: NeedleConfig, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(settings, eval_fraction=_EVAL_FRACTION)
        self._config = config
        self._vocabulary = NeedleVocabulary.of(tokenizer)

    def draw(self, rng: random.Random) -> Prompt:
        """See `ProceduralTask.draw`."""
        token_ids, answer = draw_needles(self._config, self._vocabulary, rng)
        return Prompt(token_ids=token_ids, answer=list(answer))

    def reward(self, trajectory: Trajectory) -> float:
        """See `Task.reward`."""
        expected = (*trajectory.answer, self._vocabulary.end)
        right = sum(got == want for got, want in zip(trajectory.response_token_ids, expected, strict=False))
        return right / len(expected)

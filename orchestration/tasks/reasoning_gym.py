"""The generators of reasoning-gym (arXiv 2505.24760), each with its own verifier."""

from __future__ import annotations

import difflib
import random
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from orchestration.contracts import Trajectory
from orchestration.tasks.base import Prompt, PromptBuilder, TaskSettings
from orchestration.tasks.config import ReasoningGymConfig
from orchestration.tasks.procedural import ProceduralTask
from orchestration.tasks.rewards import find_last_number

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset
    from transformers import PreTrainedTokenizerBase

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask(ProceduralTask):
    """Reward: the verifier's score of the extracted answer, mixed with a part for form if the configuration asks."""

    def __init__(self, config: ReasoningGymConfig, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(settings, eval_fraction=config.eval_fraction)
        self._config = config
        self._builder = PromptBuilder(tokenizer, config)
        self._dataset = _create_dataset(config, seed=settings.seed)

    def draw(self, rng: random.Random) -> Prompt:
        """See `ProceduralTask.draw`."""
        index = rng.randrange(self._config.num_examples)
        entry = self._dataset[index]
        return Prompt(
            token_ids=self._builder.from_question(entry["question"]),
            answer=entry["answer"],
            metadata={"dataset": self._config.dataset, "index": index},
        )

    def reward(self, trajectory: Trajectory) -> float:
        """See `Task.reward`."""
        # Generators are pure in the index: the entry is made again, as some hold objects that JSON can't carry.
        entry = self._dataset[trajectory.metadata["index"]]
        score = float(self._dataset.score_answer(self._extract(trajectory.text), entry))
        weight = self._config.format_weight
        return (1 - weight) * score + weight * self._is_well_formed(trajectory)

    def _extract(self, text: str) -> str | None:
        match self._config.answer_extraction:
            case "plain":
                return text.strip()
            case "last_number":
                return find_last_number(text)
            case "answer_tag":
                tags = _ANSWER_TAG.findall(text)
                return tags[-1].strip() if tags else None

    def _is_well_formed(self, trajectory: Trajectory) -> bool:
        if trajectory.finish_reason != "stop":
            return False
        text = trajectory.text.strip()
        match self._config.answer_extraction:
            case "plain":
                return bool(text)
            case "last_number":
                return bool(text) and text.removesuffix(".") == find_last_number(text)
            case "answer_tag":
                return len(_ANSWER_TAG.findall(text)) == 1


def _create_dataset(config: ReasoningGymConfig, *, seed: int) -> ProceduralDataset:
    """The generator, its parameters checked.

    Raises:
        ValueError: no such generator, no such parameter, or a value that the generator refuses.
    """
    import reasoning_gym  # slow to import: a run of another task doesn't pay for it
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        raise ValueError(
            f"task.dataset: expected a generator of reasoning-gym, got {config.dataset!r}"
            + _suggest(config.dataset, DATASETS)
        )
    known = {field.name for field in fields(DATASETS[config.dataset][1])} - {"seed", "size"}
    for name in config.parameters:
        if name not in known:
            raise ValueError(
                f"task.parameters.{name}: {config.dataset} of reasoning-gym has no such parameter; "
                f"it has {', '.join(sorted(known))}"
            )
    parameters: dict[str, Any] = {"seed": seed, "size": config.num_examples, **config.parameters}
    try:
        return reasoning_gym.create_dataset(config.dataset, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"task.parameters, task.num_examples ({config.num_examples}): {config.dataset} of reasoning-gym refuses "
            f"them: {error}"
        ) from error


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""

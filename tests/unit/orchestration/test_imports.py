"""Imports go one way, and configuration stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("kv_policies", "rollout_workers", "learner", "orchestration")
ALLOWED = {
    "kv_policies": ("kv_policies",),
    "rollout_workers": ("rollout_workers", "kv_policies", "orchestration.contracts"),
    "learner": ("learner", "kv_policies", "orchestration.contracts"),
    "orchestration": PACKAGES,
}
FRAMEWORKS = {
    "kv_policies": ("vllm", "ray", "deepspeed", "transformers"),
    "rollout_workers": ("deepspeed",),
    "learner": ("vllm",),
    "orchestration": ("vllm", "deepspeed"),
}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth; `from a import b` counts as a.b."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("package", PACKAGES)
def test_direction(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imported_modules(path)
        if (is_within(module, PACKAGES) and not is_within(module, ALLOWED[package]))
        or is_within(module, FRAMEWORKS[package])
    ]
    assert not wrong


def test_relative_imports_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "learner" / "sub" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ...orchestration import driver\nfrom . import other\nimport vllm.engine\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(imported_modules(path)) == ["orchestration.driver", "learner.sub.other", "vllm.engine"]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("orchestration.config", {"torch", "vllm", "ray", "deepspeed", "transformers"}),
        ("orchestration.contracts", {"torch", "vllm", "ray", "deepspeed", "transformers"}),
        ("orchestration.cli", {"torch", "vllm", "ray", "deepspeed", "transformers", "pyarrow"}),
        ("orchestration.driver", {"torch", "vllm", "ray", "deepspeed"}),
    ],
)
def test_light_modules(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({forbidden!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_imports_change_neither_environment_nor_ray() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "import orchestration.cli, orchestration.driver, orchestration.placement, orchestration.workers, ray\n"
        "after = {k: v for k, v in os.environ.items() if not k.startswith('RAY_')}\n"
        "assert after == {k: v for k, v in before.items() if not k.startswith('RAY_')}\n"
        "assert not ray.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""Layers, messages and round trips of the run configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kv_policies.config import DenseConfig, SnapKVConfig, StreamingLLMConfig
from orchestration.config import ConfigError, dump_config, load_config

REPOSITORY = Path(__file__).parents[3]
SHIPPED = sorted((REPOSITORY / "deploy" / "configs").glob("*.toml"))

BASE = """
[model]
path = "models/m"
[task]
type = "needle"
[policy]
type = "snapkv"
budget_ratio = 0.5
window_tokens = 8
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def message(paths, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(paths, overrides)
    return str(caught.value)


def test_later_files_win_key_by_key_and_overrides_win_over_files(base: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.toml"
    second.write_text("[policy]\nwindow_tokens = 4\n[run]\nnum_steps = 3\nseed = 7\n")
    config = load_config([base, second], ["run.num_steps=9"])
    assert config.policy == SnapKVConfig(budget_ratio=0.5, window_tokens=4)
    assert (config.run.num_steps, config.run.seed) == (9, 7)
    assert load_config([second, base]).policy == SnapKVConfig(budget_ratio=0.5, window_tokens=8)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=hello", "hello"),
        ('run.name="hello"', "hello"),
        ("run.seed=3", 3),
        ("learner.optimizer.learning_rate=1e-3", 1e-3),
        ("learner.gradient_checkpointing=true", True),
        ("learner.optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
    ],
)
def test_override_values_are_toml_or_bare_strings(base: Path, override: str, value: object) -> None:
    found: object = load_config([base], [override])
    for key in override.partition("=")[0].split("."):
        found = getattr(found, key)
    assert found == value


def test_another_type_drops_the_keys_that_it_does_not_have(base: Path) -> None:
    assert load_config([base], ["policy.type=dense"]).policy == DenseConfig()
    assert load_config([base], ["policy.type=streaming_llm"]).policy == StreamingLLMConfig(budget_ratio=0.5)


def test_a_key_given_beside_the_new_type_is_not_dropped(base: Path) -> None:
    text = message([base], ["policy.type=dense", "policy.window_tokens=3"])
    assert text == "policy.window_tokens: unknown key for type dense"


def test_an_empty_override_unsets_a_key(base: Path) -> None:
    config = load_config([base], ["policy.budget_ratio=", "policy.budget_tokens=40"])
    assert config.policy == SnapKVConfig(budget_tokens=40, window_tokens=8)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "learner.optimizer.lerning_rate=1",
            "learner.optimizer.lerning_rate: unknown key, did you mean learner.optimizer.learning_rate?",
        ),
        (
            "policy.windw_tokens=1",
            "policy.windw_tokens: unknown key for type snapkv, did you mean policy.window_tokens?",
        ),
        ("seed=1", "seed: unknown key, did you mean run.seed?"),
        ("polcy.type=dense", "polcy: unknown key, did you mean policy?"),
        ("run.zzz=1", "run.zzz: unknown key"),
        (
            "policy.type=foo",
            "policy.type: expected one of 'dense', 'snapkv', 'streaming_llm', 'random', got 'foo'",
        ),
        ("run.num_steps=0", "run.num_steps: expected greater than or equal to 1, got 0"),
        ("sampling.temperature=inf", "sampling.temperature: expected a finite number, got inf"),
        ("learner.optimizer.learning_rate=nan", "learner.optimizer.learning_rate: expected a finite number, got nan"),
        ("sampling.seed=4294967296", "sampling.seed: expected less than 4294967296, got 4294967296"),
        ("run=3", "run: expected a table, got 3"),
        ("task=", "task: expected a value, the configuration gives none"),
        ("no_equals", "--set no_equals: expected section.key=value"),
        (".a=1", "--set .a=1: expected section.key=value"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(base: Path, override: str, expected: str) -> None:
    assert message([base], [override]) == expected


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["policy.budget_ratio=", "policy.budget_tokens=4"], ["policy", "budget_tokens", "8"]),
        (["rollout.max_model_len=64"], ["rollout.max_model_len", "sampling.max_response_tokens"]),
        (
            ["sampling.max_response_tokens=1", "rollout.max_model_len=64"],
            ["sampling.max_response_tokens", "task.num_needles"],
        ),
        (
            ["policy.budget_ratio=", "policy.budget_tokens=128", "rollout.max_model_len=128"],
            ["policy.budget_tokens", "rollout.max_model_len"],
        ),
        (["task.min_filler_tokens=500"], ["task", "min_filler_tokens", "num_filler_tokens"]),
        (
            ["task.type=jsonl", "task.path=x", "task.prompt_template=hi"],
            ["task", "prompt_template", "{question}"],
        ),
        (
            ["task.type=jsonl", "task.path=x", "task.system_prompt=hi", "task.apply_chat_template=false"],
            ["system_prompt", "apply_chat_template"],
        ),
        (["sampling.top_p=0.9"], ["sampling", "top_p"]),
    ],
)
def test_settings_that_do_not_fit_together_are_all_named(base: Path, overrides: list[str], fields: list[str]) -> None:
    text = message([base], overrides)
    assert "\n" not in text
    assert all(field in text for field in fields), text


def test_every_problem_has_its_own_line(base: Path) -> None:
    lines = message([base], ["run.num_steps=0", "run.zzz=1"]).splitlines()
    assert len(lines) == 2


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert message([missing]).startswith(f"{missing}: can't read this configuration file")
    assert message([broken]).startswith(f"{broken}: not valid TOML")
    assert message([tmp_path]).startswith(f"{tmp_path}: can't read")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config([path])
    dumped = tmp_path / "dumped.toml"
    dumped.write_text(dump_config(config))
    assert load_config([dumped]) == config


def test_something_is_shipped() -> None:
    assert "quickstart" in {path.stem for path in SHIPPED}


def test_reading_a_configuration_imports_nothing_heavy(base: Path) -> None:
    code = (
        "import sys; from orchestration.config import load_config; load_config(sys.argv[1:]); "
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(base)], check=True, cwd=REPOSITORY)

"""Reward functions: what is found, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.tasks.rewards import BUILTIN_REWARDS, load_reward


@pytest.mark.parametrize(
    ("name", "response", "answer", "reward"),
    [
        ("exact_match", " 12\n", 12, 1.0),
        ("exact_match", "12.", "12", 0.0),
        ("last_number", "3 + 4 = 7.", "7", 1.0),
        ("last_number", "7 is not 8", 7, 0.0),
        ("last_number", "1,200.50 in all", 1200.5, 1.0),
        ("last_number", "10-3", 3, 1.0),
        ("last_number", "it is -3", -3, 1.0),
        ("last_number", "seven", 7, 0.0),
        ("contains", "PARIS, of course", "Paris", 1.0),
        ("contains", "Rome", "Paris", 0.0),
    ],
)
def test_built_in_rewards(name: str, response: str, answer: object, reward: float) -> None:
    assert load_reward(name) is BUILTIN_REWARDS[name]
    assert load_reward(name)(response=response, answer=answer, metadata={}) == reward


def test_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penumbra_test_rewards.py").write_text(
        "def score(*, response, **_):\n    return float(len(response))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("penumbra_test_rewards:score")(response="abc", answer=None, metadata={}) == 3.0


def test_function_of_a_file_that_has_dataclasses(tmp_path: Path) -> None:
    source = tmp_path / "reward.py"
    source.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Weights:\n    good: float = 2.0\n"
        "def score(response, answer, metadata):\n    return Weights().good\n"
    )
    assert load_reward(f"{source}:score")(response="", answer=None, metadata={}) == 2.0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("exactmatch", "expected one of exact_match, last_number, contains, module:function or path"),
        (":score", "expected one of exact_match"),
        ("no_such_module_here:score", "can't import 'no_such_module_here' .*path/to/file.py:function"),
        ("{folder}/missing.py:score", "expected a Python file at .*missing.py"),
        (
            "{folder}/reward.py:scores",
            "expected a function 'scores' in .*reward.py, there is none; it defines bad, later, score",
        ),
        ("{folder}/reward.py:bad", r"must be callable as function\(response=..., answer=..., metadata=...\): "),
        ("{folder}/exits.py:score", "can't run .*exits.py: SystemExit: 0"),
        ("{folder}/reward.py:later", r"expected a plain function, .*reward.py:later is a coroutine function"),
        ("{folder}/broken.py:score", "can't run .*broken.py: ZeroDivisionError: division by zero"),
    ],
)
def test_refusals_name_the_setting_and_fit_one_line(tmp_path: Path, spec: str, expected: str) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(**_):\n    return 1.0\ndef bad(response):\n    return 1.0\nasync def later(**_):\n    return 1.0\n"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"^task\.reward: .*" + expected) as caught:
        load_reward(spec.format(folder=tmp_path))
    assert "\n" not in str(caught.value)

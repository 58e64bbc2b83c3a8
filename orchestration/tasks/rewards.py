"""Reward functions: the built-in ones, and those that users bring.

A reward function is called with keywords, once a response:

    def reward(*, response: str, answer: Any, metadata: Mapping[str, Any], **_: Any) -> float

`response` is the decoded response without special tokens, `answer` and `metadata` come from the dataset row. Take
`**_` to stay compatible with keywords that later versions add. It may raise or return NaN: the sample is then counted
and dropped, and the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., float]

_NUMBER = re.compile(r"(?<!\d)[-+]?\d[\d,]*(?:\.\d+)?")
"""A sign right after a digit is an operator: the last number of "7-3" is 3."""


def exact_match(*, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
    """1 if the response is the answer, blanks at both ends aside.

    Example:
        >>> exact_match(response=" Paris ", answer="Paris", metadata={})
        1.0
    """
    return float(response.strip() == str(answer).strip())


def last_number(*, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
    """1 if the last number of the response equals the answer, as numbers.

    Example:
        >>> last_number(response="3 + 4 = 7.", answer=7, metadata={})
        1.0
    """
    number = find_last_number(response)
    return float(number is not None and to_float(number) == to_float(str(answer)))


def contains(*, response: str, answer: Any, metadata: Mapping[str, Any]) -> float:
    """1 if the answer occurs in the response, upper and lower case alike.

    Example:
        >>> contains(response="It is paris, I think", answer="Paris", metadata={})
        1.0
    """
    return float(str(answer).strip().lower() in response.lower())


BUILTIN_REWARDS: Mapping[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "contains": contains,
}


def find_last_number(text: str) -> str | None:
    """The last number in a text, as it is written there; None if there is none.

    Example:
        >>> find_last_number("from -3 to 1,200.")
        '1,200'
    """
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def to_float(number: str) -> float:
    """The value of a number with thousands separators.

    Raises:
        ValueError: it is not a number.
    """
    return float(number.replace(",", ""))


def load_reward(spec: str) -> RewardFunction:
    """Finds a reward function and checks that it can be called.

    Args:
        spec: name of a built-in, "module:function" or "path/to/file.py:function".

    Raises:
        ValueError: nothing is there, it can't be imported, or it doesn't take the keywords.
    """
    if spec in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[spec]
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(
            f"task.reward: expected one of {', '.join(BUILTIN_REWARDS)}, module:function or path/to/file.py:function, "
            f"got {spec!r}"
        )
    module = _load_file(source, spec) if source.endswith(".py") else _load_module(source, spec)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"task.reward: expected a function {name!r} in {source}, there is none; it defines {_own_functions(module)}"
        )
    _check_signature(function, spec)
    return function


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    # The module is the user's: whatever it raises, `sys.exit()` included, is a fault of the configuration.
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"task.reward: can't import {name!r} of {spec!r}: {type(error).__name__}: {error} "
            "(a file outside the Python path is given as path/to/file.py:function)"
        ) from error


def _load_file(source: str, spec: str) -> ModuleType:
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"task.reward: expected a Python file at {path} ({spec!r}), there is none")
    module_spec = importlib.util.spec_from_file_location(f"penumbra_reward_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickle look a function's module up by its name.
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"task.reward: can't run {path}: {type(error).__name__}: {error}") from error
    return module


def _own_functions(module: ModuleType) -> str:
    own = [
        name for name, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module.__name__
    ]
    return ", ".join(own) or "no function"


def _check_signature(function: RewardFunction, spec: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"task.reward: expected a plain function, {spec} is a coroutine function (async def)")
    try:
        inspect.signature(function).bind(response="", answer=None, metadata={})
    except TypeError as error:
        raise ValueError(
            f"task.reward: {spec} must be callable as function(response=..., answer=..., metadata=...): {error}"
        ) from None

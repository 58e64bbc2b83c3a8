"""Layers of a configuration before it is checked, and what is said when the check fails."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

_UNSET = object()
"""Value of an override that takes a key away again."""


class ConfigError(ValueError):
    """A configuration that can't be used; the message is meant for the user as it is, without a traceback."""


def read_toml(path: Path) -> dict[str, Any]:
    """Parses one file.

    Raises:
        ConfigError: it can't be read, or it is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't read this configuration file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", ...] as one nested table; a later one wins.

    Raises:
        ConfigError: no "=", an empty key, or a key below a value that is not a table.
    """
    layer: dict[str, Any] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {override}: expected section.key=value")
        table = layer
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override}: {key} was set to a value by an earlier --set")
        table[keys[-1]] = _parse_value(text.strip())
    return layer


def _parse_value(text: str) -> Any:
    if not text:
        return _UNSET
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def merge(model: Any, base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """`layer` over `base`, key by key, tables inside tables too.

    Args:
        model: pydantic model, or union of models told apart by `type`, that both describe. Where `layer` changes the
            `type`, the keys of `base` that the new type doesn't have are dropped.
    """
    merged = dict(base)
    if "type" in layer and layer["type"] != base.get("type"):
        new_fields = _fields(_variant(model, layer))
        merged = {key: value for key, value in base.items() if key in new_fields}
    fields = _fields(_variant(model, {**merged, **layer}))
    for key, value in layer.items():
        if value is _UNSET:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(fields.get(key), below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def describe_errors(model: type[BaseModel], data: Mapping[str, Any], error: ValidationError) -> str:
    """One line for each problem: dotted key, what was expected, what came."""
    return "\n".join(_describe(model, data, detail) for detail in error.errors())


def _describe(model: type[BaseModel], data: Mapping[str, Any], detail: Any) -> str:
    path = _strip_union_tags(detail["loc"], data)
    dotted = ".".join(map(str, path))
    match detail["type"]:
        case "extra_forbidden":
            kind, close = _search_key(model, data, path)
            variant = f" for type {kind}" if kind else ""
            return f"{dotted}: unknown key{variant}" + (f", did you mean {close}?" if close else "")
        case "missing":
            return f"{dotted}: expected a value, the configuration gives none"
        case "union_tag_invalid":
            expected = detail["ctx"]["expected_tags"]
            return f"{dotted}.type: expected one of {expected}, got {detail['ctx']['tag']!r}"
        case "union_tag_not_found":
            return f"{dotted}.type: expected a value, the configuration gives none"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{dotted}: expected a table, got {detail['input']!r}"
        case "value_error":
            message = str(detail["ctx"]["error"])
            return f"{dotted}: {message}" if dotted else message
        case _:
            message = detail["msg"].removeprefix("Input should be ")
            return f"{dotted}: expected {message}, got {detail['input']!r}"


def _strip_union_tags(loc: Sequence[int | str], data: Any) -> list[int | str]:
    """pydantic's location of an error names the chosen member of a union by its tag: not a key of the file."""
    path: list[int | str] = []
    for item in loc:
        if isinstance(data, Mapping):
            if item == data.get("type") and item not in data:
                continue
            data = data.get(item)
        path.append(item)
    return path


def _search_key(
    model: type[BaseModel], data: Mapping[str, Any], path: Sequence[int | str]
) -> tuple[str | None, str | None]:
    """For the unknown key at `path`: the `type` of its table, and the dotted key that was probably meant."""
    *parents, leaf = map(str, path)
    known: Any = model
    table: Any = data
    for key in parents:
        known = _fields(_variant(known, table)).get(key)
        table = table.get(key, {})
    kind = table.get("type")
    siblings = difflib.get_close_matches(leaf, _fields(_variant(known, table)), n=1)
    if siblings:
        return kind, ".".join([*parents, siblings[0]])
    elsewhere: dict[str, str] = {}
    for dotted in _dotted_keys(model, data):
        elsewhere.setdefault(dotted.rpartition(".")[2], dotted)
    close = difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.8)
    return kind, elsewhere[close[0]] if close else None


def _dotted_keys(model: Any, data: Any, prefix: str = "") -> Iterator[str]:
    """All keys that may be given, for the members of unions that `data` chooses."""
    table = data if isinstance(data, Mapping) else {}
    for key, annotation in _fields(_variant(model, table)).items():
        yield prefix + key
        yield from _dotted_keys(annotation, table.get(key), f"{prefix}{key}.")


def _variant(annotation: Any, table: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model that checks `table`: the annotation itself, or the member of a union that its `type` names."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    for candidate in get_args(annotation) or (annotation,):
        if not (isinstance(candidate, type) and issubclass(candidate, BaseModel)):
            continue
        tag = candidate.model_fields.get("type")
        if tag is None or not get_args(annotation) or table.get("type", tag.default) in get_args(tag.annotation):
            return candidate
    return None


def _fields(model: type[BaseModel] | None) -> dict[str, Any]:
    """Field name -> annotation."""
    return {name: field.annotation for name, field in model.model_fields.items()} if model else {}

"""From a YAML file and `key=value` overrides to a `Config`; every problem is reported at once, with file and line.

- Keys of overrides are full paths (`actor.optimizer.lr=1e-6`); values follow the same rules as in the file, lists are
  written `[1, 2]` and replace the file's. An override beats the file. The same key twice on the command line is refused.
- Keys that start with `x-` are the user's notes and are not read. Merge keys (`<<: *anchor`) work.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mcore_rl.config.fields import alternatives, range_problem, section_type, type_hints, type_text
from mcore_rl.config.rules import Config, inapplicable
from mcore_rl.config.yaml_tree import Node, parse_yaml, read_yaml
from parallel.errors import UserError, nearest

# what users of other programs write, by our name
SYNONYMS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",), "tp": ("tensor_model_parallel_size", "tensor_parallel_size"), "steps": ("max_steps", "total_steps"),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_size"), "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "parallel": ("megatron",), "samples_per_prompt": ("n", "num_generations", "n_samples_per_prompt", "group_size"),
    "max_tokens": ("max_new_tokens", "max_response_length"), "max_prompt_tokens": ("max_prompt_length",),
    "kl_coefficient": ("kl_coef", "beta"), "path": ("name_or_path", "model_path"), "dir": ("output_dir",), "clip_grad": ("max_grad_norm",),
    "train": ("train_files",),
}
_FLOAT = re.compile(r"[-+]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_INT = re.compile(r"[-+]?(0|[1-9]\d*(_\d+)*)")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Mistyped(Exception):
    pass


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), kind: str = "train") -> Config:
    """Read `path` for the command `kind` ("train", "sft" or "evaluate"). Raises UserError naming every problem."""
    root, problems = read_yaml(path)
    if not isinstance(root.value, dict):
        raise UserError(f"{path}: the configuration must be a mapping of sections, such as 'run:' and 'model:'")
    problems += _apply_overrides(root, overrides)
    given: dict[str, str] = {}
    config = _build(Config, root, "", "", problems, given, extra={"kind": kind})
    if config is not None and not problems:
        for key, why in inapplicable(config):
            below = [name for name in given if name == key or name.startswith(key + ".")]
            problems += [f"{given[name]}: {name} has no effect: {why}" for name in below
                         if not any(other.startswith(name + ".") for other in below)]
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise UserError(f"configuration {path} has {count}:\n" + "\n".join(f"  {p}" for p in dict.fromkeys(problems)))
    assert config is not None
    return config


def _apply_overrides(root: Node, overrides: list[str] | tuple[str, ...]) -> list[str]:
    problems: list[str] = []
    seen: dict[str, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key, where = key.strip(), f"override {text!r}"
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            problems.append(f"{where}: write section.key=value, such as actor.optimizer.lr=1e-6")
            continue
        clash = next((k for k in seen if k == key or k.startswith(key + ".") or key.startswith(k + ".")), None)
        if clash is not None:
            problems.append(f"{where}: {clash} is already set by override {seen[clash]!r}; give one of them")
            continue
        seen[key] = text
        node, wrong = parse_yaml(value, where)
        if not value.strip() or wrong or isinstance(node.value, dict):
            problems.append(f"{where}: give one value per key (null, a word, a number or a list); sections are set key by key")
            continue
        _set(root, key.split("."), _relocated(node, where))
    return problems


def _relocated(node: Node, where: str) -> Node:
    children = [_relocated(n, where) for n in node.value] if isinstance(node.value, list) else node.value
    return Node(children, where, node.quoted)


def _set(node: Node, path: list[str], value: Node) -> None:
    for name in path[:-1]:
        assert isinstance(node.value, dict)
        child = node.value.get(name)
        if child is None or not isinstance(child.value, dict):
            child = node.value[name] = Node({}, value.where)
        node = child
    assert isinstance(node.value, dict)
    node.value[path[-1]] = value


def _build(section: type, node: Node, path: str, shown: str, problems: list[str], given: dict[str, str],
           extra: dict[str, Any] | None = None) -> Any:
    """Make `section` from a mapping node; None where a problem stands in the way. `path` ends with a dot or is empty.

    `shown` is the path as the user wrote it (it differs below a misspelt section, whose keys are checked all the same).
    """
    assert isinstance(node.value, dict)
    hints = {name: hint for name, hint in type_hints(section).items() if name not in (extra or {})}
    fields = {f.name: f for f in dataclasses.fields(section)}
    values, before = dict(extra or {}), len(problems)
    for key, child in node.value.items():
        if key not in hints:
            problems.append(_unknown(key, child, path, shown, hints, problems))
            continue
        inner, full = section_type(hints[key]), f"{path}{key}"
        if inner is None or (child.is_null and type(None) in alternatives(hints[key])):
            given[full] = child.where
            values[key] = _value(hints[key], fields[key], child, full, problems)
        elif not isinstance(child.value, dict):
            problems.append(f"{child.where}: {full} is {child.text()}; it is a section with the keys {', '.join(type_hints(inner))}"
                            + ("; remove the line to use its defaults" if child.is_null else ""))
        else:
            given[full] = child.where
            values[key] = _build(inner, child, full + ".", shown + key + ".", problems, given)
    for name, item in fields.items():
        if name in hints and name not in node.value and item.default is item.default_factory is dataclasses.MISSING:
            inner = section_type(hints[name])
            needed = [f"{path}{name}.{f.name}" for f in dataclasses.fields(inner) if f.default is f.default_factory is dataclasses.MISSING
                      ] if inner else [f"{path}{name}"]
            problems += [f"{node.where}: {key} is not set and has no default; set it" for key in needed]
    if len(problems) > before:
        return None
    try:
        return section(**values)
    except UserError as error:
        for line in str(error).splitlines():
            if path:  # a section names itself without its role: parallel.tp
                problems.append(f"{node.where}: {path.rsplit('.', 2)[0]}.{line}")
            else:
                where = given.get(line.split()[0])
                problems.append(f"{where}: {line}" if where else line)
        return None


def _unknown(key: str, node: Node, path: str, shown: str, hints: dict[str, Any], problems: list[str]) -> str:
    """One line for an unknown key; a misspelt section is also looked into."""
    message = f"{node.where}: unknown key {shown}{key}"
    guess = _nearest_name(key, hints)
    inner = section_type(hints[guess]) if guess else None
    if guess and (inner is None or isinstance(node.value, dict) or node.is_null):
        if inner is not None and isinstance(node.value, dict):
            below: list[str] = []
            names = type_hints(inner)
            for name, child in node.value.items():
                if name not in names:
                    below.append(_unknown(name, child, f"{path}{guess}.", f"{shown}{key}.", names, problems))
            problems += below
        return f"{message}; did you mean {path}{guess}?"
    elsewhere = [full for full in all_keys(Config) if full.rsplit(".", 1)[-1] in (key, _synonym(key))]
    if elsewhere:
        return f"{message}; {'that key' if elsewhere[0].endswith('.' + key) else 'a like key'} is valid as {', '.join(elsewhere[:3])}"
    far = _nearest_name(key, {full.rsplit(".", 1)[-1]: None for full in all_keys(Config)})
    hint = next((f"; did you mean {full}?" for full in all_keys(Config) if far and full.rsplit(".", 1)[-1] == far), "")
    return f"{message}{hint or '; allowed here: ' + ', '.join(hints)}"


def _synonym(key: str) -> str | None:
    return next((ours for ours, others in SYNONYMS.items() if key.lower() in others), None)


def _nearest_name(key: str, names: dict[str, Any]) -> str | None:
    words = {word: name for name in names for word in SYNONYMS.get(name, ())} | {name: name for name in names}
    found = key if key in words else nearest(key, words)
    return words[found] if found else None


def all_keys(section: type, path: str = "") -> list[str]:
    """Full paths of all keys below `section`, sections included."""
    keys = []
    for name, hint in type_hints(section).items():
        if path or name != "kind":
            inner = section_type(hint)
            keys += [f"{path}{name}", *(all_keys(inner, f"{path}{name}.") if inner else [])]
    return keys


def _value(hint: Any, item: dataclasses.Field[Any], node: Node, full: str, problems: list[str]) -> Any:
    try:
        value = convert(hint, node)
    except _Mistyped as error:
        problems.append(f"{node.where}: {full} is {node.text()}; allowed: {type_text(hint)}{error}")
        return None
    if (problem := range_problem(item, value)) is not None:
        problems.append(f"{node.where}: {full} is {node.text()}; it {problem}")
    return value


def convert(hint: Any, node: Node) -> Any:
    """The value of `node` as the type `hint`. Raises _Mistyped with a hint for the user (may be empty)."""
    kinds = alternatives(hint)
    if node.is_null and node.value != "":
        if type(None) in kinds:
            return None
        raise _Mistyped(", not null")
    if node.is_null:
        if type(None) in kinds:
            return None
        raise _Mistyped("; the value is missing")
    failure = _Mistyped("")
    # choices first: `auto` is a choice before it is text
    for kind in sorted((k for k in kinds if k is not type(None)), key=lambda k: get_origin(k) is not Literal):
        try:
            return _convert_one(kind, node)
        except _Mistyped as error:
            failure = error
    raise failure


def _convert_one(kind: Any, node: Node) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(node.value, list):
            raise _Mistyped(", written [a, b]")
        return tuple(convert(get_args(kind)[0], child) for child in node.value)
    if not isinstance(node.value, str):
        raise _Mistyped("")
    text = node.value.strip()
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            guess = nearest(text, get_args(kind))
            raise _Mistyped(f"; did you mean {guess}?" if guess else "")
        return text
    if kind is str:
        return node.value
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise _Mistyped("")
        return _BOOLS[text.lower()]
    if kind is int and _INT.fullmatch(text):
        return int(text)
    if kind is int and re.fullmatch(r"[-+]?0[\d_]+", text):
        raise _Mistyped(" without leading zeros")
    if not _FLOAT.fullmatch(text):
        raise _Mistyped("")
    number = float(text)
    if math.isinf(number):
        raise _Mistyped("; it is too large")
    if kind is int:
        if number != int(number):
            raise _Mistyped("")
        return int(number)
    return number

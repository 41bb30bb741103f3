"""What a configuration field knows about itself: its help line and the values it allows."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from dataclasses import field
from typing import Any, Literal, Union, get_args, get_origin

from parallel.errors import UserError


def option(help: str, default: Any = dataclasses.MISSING, *, low: float | None = None, above: float | None = None,
           high: float | None = None, below: float | None = None, section: type | None = None) -> Any:
    """A dataclass field with a help line and a range: low <= value <= high, above < value < below (None: open).

    `section` makes the default a fresh section of that type.
    """
    metadata = {"help": help, "range": (low, above, high, below)}
    if section is not None:
        return field(default_factory=section, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def type_hints(section: type) -> dict[str, Any]:
    """The evaluated type of each field of a dataclass."""
    return {k: v for k, v in typing.get_type_hints(section).items() if k in {f.name for f in dataclasses.fields(section)}}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """`X | None` as (X, NoneType); any other type as itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def section_type(hint: Any) -> type | None:
    """The dataclass in `hint` (also in `Section | None`), or None for a plain value."""
    return next((a for a in alternatives(hint) if isinstance(a, type) and dataclasses.is_dataclass(a)), None)


def type_text(hint: Any) -> str:
    """`hint` in the words of the documentation."""
    words = []
    for part in alternatives(hint):
        if get_origin(part) is Literal:
            words += [str(a) for a in get_args(part)]
        elif get_origin(part) is tuple:
            item = get_args(part)[0]
            words.append(f"list of {type_text(item)}" + ("" if get_origin(item) is Literal else "s"))
        elif section_type(part):
            words.append("section")
        else:
            words.append({bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}[part])
    return " or ".join(words)


def range_text(item: dataclasses.Field[Any]) -> str:
    """The range of a field, such as "> 0 and <= 1"; empty where any value is allowed."""
    bounds = zip((">=", ">", "<=", "<"), item.metadata.get("range", (None,) * 4), strict=True)
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def range_problem(item: dataclasses.Field[Any], value: Any) -> str | None:
    """What is wrong with `value` by the range of its field, or None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or "range" not in item.metadata:
        return None
    low, above, high, below = item.metadata["range"]
    fits = ((low is None or value >= low) and (above is None or value > above)
            and (high is None or value <= high) and (below is None or value < below))
    return None if fits and math.isfinite(value) else f"must be {range_text(item) or 'a finite number'}"


def check_ranges(section: Any, name: str) -> None:
    """Refuse a section, made in Python, whose values are out of range. Raises UserError naming all of them."""
    problems = []
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if (problem := range_problem(item, value)) is not None:
            problems.append(f"{name}.{item.name} is {value!r}; it {problem}")
        for part in alternatives(type_hints(type(section))[item.name]):
            if get_origin(part) is Literal and isinstance(value, str) and value not in get_args(part):
                problems.append(f"{name}.{item.name} is {value!r}; it must be one of {', '.join(map(str, get_args(part)))}")
    if problems:
        raise UserError("\n".join(problems))

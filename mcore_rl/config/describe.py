"""The words of the configuration: `--help` text and docs/configuration.md, both from the dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mcore_rl.config.fields import range_text, section_type, type_hints, type_text
from mcore_rl.config.rules import Config

HEADER = """# Configuration

Written by `python -m mcore_rl.config > docs/configuration.md`; do not edit.

A run is one YAML file of sections and, after it on the command line, `key=value` overrides with full keys:

    mcore-rl train configs/demo_cpu.yaml run.steps=20 actor.optimizer.lr=1e-4

- Paths are relative to the working directory.
- Numbers are numbers however they are written (`1e-6`, `1E-2`, `1_000`, `'1e-6'`); `010` is refused; what stands in a text
  field is text (`off`, `3.10`, `4:00:00`). `null`, `~` and `None` are null where null is allowed.
- Unknown, duplicate and mistyped keys, and keys without effect, are errors; all of them are listed at once, with file and line.
- An override beats the file; a list replaces the file's list. The same key twice on the command line is refused.
- Keys that start with `x-` are your own notes. YAML anchors and merge keys (`<<: *name`) work.
- `config.yaml` in the run directory is the resolved configuration: every key that has an effect, with its value.
"""


def options(section: type = Config, path: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(full key, field, type) of every plain key below `section`, in order."""
    hints = type_hints(section)
    for item in dataclasses.fields(section):
        if not path and item.name == "kind":
            continue
        inner = section_type(hints[item.name])
        if inner is None:
            yield path + item.name, item, hints[item.name]
        else:
            yield from options(inner, f"{path}{item.name}.")


def default_text(item: dataclasses.Field[Any]) -> str:
    """The default of a field as it is written in YAML; "required" where there is none."""
    value = item.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, str):
        return repr(value) if not value.isalnum() and any(c.isspace() for c in value) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(kind: str = "train") -> str:
    """The keys of a configuration file for `--help`: one line each, by section."""
    lines: list[str] = []
    section = ""
    for key, item, hint in options():
        top = key.split(".")[0]
        if top == ("sft" if kind != "sft" else "warm_up"):
            continue
        if top != section:
            section = top
            lines.append(f"\n{top}: {_help_of(top)}")
        lines.append(f"  {key} ({type_text(hint)}; {_default_word(item)})\n      {item.metadata['help']}")
    return "\n".join(lines).lstrip("\n")


def _default_word(item: dataclasses.Field[Any]) -> str:
    text = default_text(item)
    return text if text == "required" else f"default {text}"


def _help_of(section: str) -> str:
    return next(f.metadata["help"] for f in dataclasses.fields(Config) if f.name == section)


def markdown() -> str:
    """The whole of docs/configuration.md."""
    lines, section = [HEADER], ""
    for key, item, hint in options():
        top = key.split(".")[0]
        if top != section:
            section = top
            lines += [f"\n## {top}\n", f"{_help_of(top)[0].upper()}{_help_of(top)[1:]}.\n",
                      "| key | value | default | meaning |", "|---|---|---|---|"]
        values = type_text(hint) + (f", {range_text(item)}" if range_text(item) else "")
        cells = [f"`{key}`", values, f"`{default_text(item)}`", item.metadata["help"]]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"

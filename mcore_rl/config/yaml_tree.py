"""YAML with the places kept: text to a tree of nodes, each with its file and line.

Types are not guessed here (YAML 1.1 reads `1e-6` as text, `off` as false, `010` as 8 and `4:00:00` as 14400): a scalar
stays the text that was written, and the field it is meant for says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from parallel.errors import UserError

NULL_WORDS = ("", "~", "null", "Null", "NULL", "None")


@dataclass
class Node:
    """A scalar (text), a list or a mapping, and where it stands ("file:line")."""

    value: str | list[Node] | dict[str, Node]
    where: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        return isinstance(self.value, str) and not self.quoted and self.value in NULL_WORDS

    def text(self) -> str:
        """The value as it is shown in messages."""
        if isinstance(self.value, str):
            return repr(self.value) if self.quoted else self.value or "null"
        if isinstance(self.value, list):
            return "[" + ", ".join(n.text() for n in self.value) + "]"
        return "{" + ", ".join(f"{k}: {n.text()}" for k, n in self.value.items()) + "}"


@dataclass
class _Reader:
    file: str
    problems: list[str] = field(default_factory=list)

    def read(self, node: Any, path: str) -> Node:
        where = f"{self.file}:{node.start_mark.line + 1}"
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            self.problems.append(f"{where}: {path}: the tag {node.tag!r} is not supported; write plain YAML")
        if isinstance(node, yaml.ScalarNode):
            return Node(node.value, where, quoted=node.style is not None)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(child, path) for child in node.value], where)
        return Node(self.read_mapping(node, path, ()), where)

    def read_mapping(self, node: Any, path: str, merging: tuple[Any, ...]) -> dict[str, Node]:
        """Entries of a mapping; merge keys (`<<`) add what is not set in it. Duplicate keys become problems with both lines."""
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        merges: list[Any] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{self.file}:{line}: a key must be a word, not a list or a mapping")
                continue
            key = key_node.value
            full = f"{path}.{key}" if path else key
            if key == "<<" and key_node.style is None:
                merges.append(value_node)
                continue
            if key in entries:
                self.problems.append(f"{self.file}:{line}: duplicate key {full} (lines {lines[key]} and {line}); keep one")
            if key.startswith("x-"):
                continue  # a user's note: any YAML may stand there, also an anchor used elsewhere
            lines[key] = line
            entries[key] = self.read(value_node, full)
            entries[key].where = f"{self.file}:{line}"  # a section's own mark is its first key's line
        for value_node in merges:
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                if not isinstance(source, yaml.MappingNode) or source is node or source in merging:
                    self.problems.append(f"{self.file}:{source.start_mark.line + 1}: a merge key (<<) must name another mapping")
                    continue
                for key, value in self.read_mapping(source, path, (*merging, node)).items():
                    entries.setdefault(key, value)
        return entries


def parse_yaml(text: str, file: str) -> tuple[Node, list[str]]:
    """The tree of `text` and the problems found in it (duplicate keys, tags). Raises UserError where it is not YAML."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        hint = "; indent with spaces, not tabs" if "\\t" in what else ""
        raise UserError(f"{place}: not valid YAML: {what}{hint}") from None
    reader = _Reader(file)
    if node is None:
        return Node({}, f"{file}:1"), []
    try:
        return reader.read(node, ""), reader.problems
    except RecursionError:
        raise UserError(f"{file}: an anchor contains itself; remove the alias that points to its own mapping") from None


def read_yaml(path: str | Path) -> tuple[Node, list[str]]:
    """`parse_yaml` of a file. Raises UserError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"configuration file {str(path)!r} does not exist; give the path of a YAML file, such as "
                        "configs/demo_cpu.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {str(path)!r} cannot be read: {error}") from None
    return parse_yaml(text, str(path))

"""The house rules: imports point downwards, files stay readable, and the documentation names what is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"launch": 0, "mcore_rl": 1, "trtllm_rollout": 2, "checkpoint": 2, "resharding": 3, "parallel": 4}
SOURCES = sorted(path for room in LEVELS for path in (ROOT / room).rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (*LEVELS, "configs", "tests", "benchmarks", "docs", r"\.ci")
_FILE = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)(?::(\w+(?:\.\w+)*))?")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def is_composition_root(path: Path) -> bool:
    """The command line puts the rooms together, so it may import all of them."""
    return path == ROOT / "mcore_rl/cli.py" or path.parent == ROOT / "mcore_rl/commands"


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every import of a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def forbidden(room: str, other: str) -> bool:
    return other in ("tests", "benchmarks") or other in LEVELS and other != room and LEVELS[other] <= LEVELS[room]


def test_imports_point_downwards() -> None:
    assert {"mcore_rl", "parallel"} <= {path.relative_to(ROOT).parts[0] for path in SOURCES}
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {other}" for path in SOURCES if not is_composition_root(path)
             for line, other in imported(path) if forbidden(path.relative_to(ROOT).parts[0], other)]
    assert not wrong, "\n".join(wrong)


def test_the_import_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import torch\ndef f():\n    from mcore_rl.loop import train\nfrom resharding import plan\n")
    assert list(imported(file)) == [(1, "torch"), (4, "resharding"), (3, "mcore_rl")]
    assert [forbidden(*pair) for pair in [("parallel", "resharding"), ("checkpoint", "trtllm_rollout"), ("resharding", "tests"),
                                          ("mcore_rl", "launch"), ("mcore_rl", "parallel"), ("launch", "mcore_rl")]] == [True] * 4 + [False] * 2


def test_the_loop_is_read_in_one_sitting() -> None:
    assert len((ROOT / "mcore_rl/loop.py").read_text().splitlines()) < 100


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: n for name, n in lengths.items() if n > 300}


@lru_cache(maxsize=None)
def defined(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a file, methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            names.update(f"{node.name}.{inner.name}" for inner in getattr(node, "body", []) if isinstance(inner, ast.FunctionDef))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Files and folders of the repository, `file.py:function` in them, and the targets of links."""
    text = page.read_text()
    missing = []
    for name, function in set(_FILE.findall(text)):
        path = ROOT / name.rstrip(".")
        if not path.exists() or (function and path.suffix == ".py" and function not in defined(path)):
            missing.append(f"{name}:{function}" if function else name)
    missing += [target for target in set(_LINK.findall(text)) if not (page.parent / target).exists()]
    assert not missing, f"{page.name} names what is not there: {', '.join(sorted(missing))}"


def shown_commands() -> list[list[str]]:
    """The words of every command in README's shell blocks; continued lines joined, comments left out."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if not line.startswith("#")]
    return [w for w in words if "mcore-rl" in w or "mcore_rl" in w]


def split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """(launcher words, arguments of mcore-rl)."""
    at = words.index("mcore-rl") if "mcore-rl" in words else words.index("mcore_rl")
    before, after = words[:at], words[at + 1:]
    return before[:-1] if before and before[-1] == "-m" else before, after


def test_readme_shows_every_command() -> None:
    from mcore_rl.cli import COMMANDS

    shown = {split_command(words)[1][0] for words in shown_commands()}
    assert shown >= set(COMMANDS), f"README shows no example of: {', '.join(sorted(set(COMMANDS) - shown))}"


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_a_command_in_the_readme_is_valid(words: list[str]) -> None:
    """The launcher's and our own parser take it, its configuration exists, and the overrides fit that configuration."""
    from torch.distributed.run import get_args_parser

    from mcore_rl.cli import parser
    from mcore_rl.config import load_config

    launcher, rest = split_command(words)
    if "torchrun" in launcher or "launch.local" in launcher:
        at = launcher.index("torchrun" if "torchrun" in launcher else "launch.local")
        get_args_parser().parse_args([*launcher[at + 1:], "-m", "mcore_rl"])
    if rest[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            parser().parse_args(rest)
        return
    arguments = parser().parse_args(rest)
    config = getattr(arguments, "config", None)
    if config is not None and not config.startswith("runs/"):  # a run directory's own config.yaml is there after the run
        assert (ROOT / config).is_file(), config
        model = [f"model.path={arguments.model}"] if arguments.command == "evaluate" else []
        load_config(ROOT / config, [*model, *arguments.overrides], arguments.command)

"""Rows of JSONL and parquet files as plain Python values (dictionaries of text, numbers, lists, dictionaries)."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.synthetic import BUILTIN
from parallel.errors import UserError

_KINDS = (".jsonl", ".parquet")
_BUILTIN = "builtin:"


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason."""


def read_rows(source: str | Path) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of a file, of all .jsonl and .parquet files of a directory in order of their names, or of `builtin:NAME`.

    A line that is not a JSON object comes out as a `BadRow`. Raises UserError where `source` cannot be read.
    """
    name = str(source)
    if name.startswith(_BUILTIN):
        yield from _builtin(name.removeprefix(_BUILTIN))
        return
    path = Path(source)
    if not path.exists():
        raise UserError(f"data file {str(source)!r} does not exist; give a .jsonl or .parquet file, or a directory of them")
    files = sorted(p for p in path.iterdir() if p.suffix in _KINDS) if path.is_dir() else [path]
    if not files:
        raise UserError(f"data directory {str(source)!r} holds no .jsonl or .parquet file")
    for file in files:
        if file.suffix not in (*_KINDS, ".json"):
            raise UserError(f"data file {str(file)!r} ends in {file.suffix!r}; supported: .jsonl (one JSON object a line), .parquet")
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)


def _builtin(name: str) -> Iterator[dict[str, Any]]:
    if name not in BUILTIN:
        raise UserError(f"data set 'builtin:{name}' does not exist; there are: {', '.join('builtin:' + n for n in sorted(BUILTIN))}")
    return BUILTIN[name]()


def _read_jsonl(file: Path) -> Iterator[dict[str, Any] | BadRow]:
    try:
        # not splitlines(): JSON text may hold U+2028, which is no line end here
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {str(file)!r} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            yield BadRow(f"line {number} is not JSON: {getattr(error, 'msg', 'nested too deeply')}")
            continue
        yield value if isinstance(value, dict) else BadRow(f"line {number} is a JSON {type(value).__name__}, not an object")


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file)
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield {key: _plain(value) for key, value in row.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data file {str(file)!r} cannot be read as parquet: {error}") from None


def _plain(value: Any) -> Any:
    """A parquet value without the nulls of foreign struct members, and JSON can write it.

    Parquet has one struct type per column, so each struct carries the members of all rows, null where they are another
    row's. A null that is meant must be written as JSON text in a text column.
    """
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

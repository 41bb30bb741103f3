"""Rewards: what a response is worth, given its row."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from mcore_rl.config.sections import RewardConfig
from mcore_rl.data import Row
from parallel.errors import UserError, nearest

Reward = Callable[[str, Row], float]

# The number that follows the marker on its line: optional sign, digits (grouped by commas or not), decimals. Possessive
# (++, ?+), so "12/5" or "3.14/2" is no number rather than a part of one.
_NUMBER = re.compile(r"([-+]?)\s*(\d{1,3}(?:,\d{3})++|\d++)((?:\.\d++)?+)(?![\d/^]|,\d)")
_MARKER = "####"


def make_reward(config: RewardConfig) -> Reward:
    """The function (response, row) -> reward that `config` names.

    It raises UserError, naming the row, where a value is not a finite number or the row's answer cannot be read; making it
    raises UserError where a user function cannot be imported or called that way.
    """
    if config.name == "function":
        return _checked(_import(config.function or ""), f"reward function {config.function}")
    return {"exact_match": exact_match, "gsm8k": gsm8k}[config.name]


def check_answers(config: RewardConfig, rows: Iterable[Row]) -> None:
    """Refuse rows whose answer the reward cannot read, before anything is built. Raises UserError listing them."""
    if config.name != "gsm8k":
        return
    bad = [row for row in rows if _gold(row) is None]
    if bad:
        lines = "\n".join(f"  row {row.index}: {row.answer!r:.80}" for row in bad[:10])
        raise UserError(f"reward gsm8k: the answer of {len(bad)} rows holds no number (alone, or after {_MARKER}); mend them or choose "
                        f"another reward\n{lines}")


def exact_match(response: str, row: Row) -> float:
    """1.0 where response and answer are the same text after white space is stripped from both ends, else 0.0."""
    return float(row.answer is not None and response.strip() == row.answer.strip())


def gsm8k(response: str, row: Row) -> float:
    """1.0 where the number after the last `####` of the response equals that of the answer (Cobbe et al., arXiv:2110.14168).

    `$`, Markdown stars, thousands commas, trailing units and full stops do not matter; only the line of the marker counts.
    The answer is the raw GSM8K field (worked solution, then `#### number`) or the number alone.
    """
    gold = _gold(row)
    if gold is None:
        raise UserError(f"reward gsm8k: the answer of row {row.index}, {row.answer!r:.80}, holds no number; mend the row")
    return float(_MARKER in response and _number(response.rsplit(_MARKER, 1)[1]) == gold)


def _gold(row: Row) -> Decimal | None:
    return _number((row.answer or "").rsplit(_MARKER, 1)[-1])


def _number(text: str) -> Decimal | None:
    """The number at the start of the first line of `text`, or None."""
    line = text.split("\n", 1)[0].replace("\u2212", "-")  # U+2212 is the typographic minus
    found = _NUMBER.match(re.sub(r"[*$]|\\(?=\$)", "", line).lstrip())
    return Decimal(found[1] + found[2].replace(",", "") + found[3]) if found else None


def _import(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or module_name.startswith(".") or not name.isidentifier():
        raise UserError(f"reward.function is {path!r}; write package.module:function")
    here = os.getcwd()
    if here not in sys.path:  # as `python -m` has it; a console script does not
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"reward.function {path!r}: no module named {error.name!r}; it is looked for in the working directory ({here}) and "
                        "among installed packages") from None
    except SyntaxError as error:
        raise UserError(f"reward.function {path!r}: {error.filename} line {error.lineno} is not valid Python: {error.msg}") from None
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        guess = nearest(name, names)
        raise UserError(f"reward.function {path!r}: module {module_name} has no {name!r}; it has {', '.join(names) or 'no functions'}"
                        + (f"; did you mean {guess}?" if guess else ""))
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UserError(f"reward.function {path!r} is not a plain function; write def {name}(response: str, row) -> float")
    try:
        signature = inspect.signature(function)
        signature.bind("", None)
    except TypeError:
        raise UserError(f"reward.function {path!r} takes {signature}; it is called with (response, row): write "
                        f"def {name}(response: str, row) -> float") from None
    except ValueError:
        return function  # a built-in without a signature
    return function


def _checked(function: Callable[..., Any], name: str) -> Reward:
    def reward(response: str, row: Row) -> float:
        try:
            value = function(response, row)
        except Exception as error:
            error.add_note(f"in {name}, called with row {row.index}")
            raise
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(f"{name} gave {value!r:.80} for row {row.index}; it must give a number") from None
        if not math.isfinite(number):
            raise UserError(f"{name} gave {number} for row {row.index}; it must give a finite number")
        return number

    return reward

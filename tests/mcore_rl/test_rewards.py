"""Rewards: each response gets exactly the score it deserves, and what cannot be scored is an error."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.data import Row
from mcore_rl.rewards import check_answers, make_reward
from parallel.errors import UserError


def row(answer: str | None, index: int = 3) -> Row:
    return Row(index, (1,), "p", answer)


@pytest.mark.parametrize(("response", "gold", "score"), [
    ("7*8=56\n#### 56\n" + "The steps above agree with this value. " * 8, "56", 1),
    ("#### $1,250.", "1250", 1), ("#### 1,250.00", "1250", 1),
    ("#### -5", "-5", 1), ("#### 5", "-5", 0), ("#### 42 apples", "42", 1), ("####42", "42", 1), ("#### 12\nNo, wrong.\n#### 18", "18", 1),
    ("#### 12\nNo, wrong.\n#### 18", "12", 0),
    ("#### 3.0", "3", 1), ("The total is 18.", "18", 0), ("#### ", "0", 0), ("#### 7\r\n", "7", 1),
    ("####  **64**", "64", 1), ("#### -$5", "-5", 1), ("#### \u22125", "-5", 1), ("#### 12/5", "12", 0), ("#### 1,2,3", "1", 0),
    ("#### 3.14/2", "3", 0), ("#### 18 2nd", "18", 1), ("#### \n18", "18", 0),
    ("#### 18", "He packs <<15+3=18>>18.\n#### 18", 1), ("", "0", 0),
    ("#### 100000000000000000001", "100000000000000000000", 0)])
def test_gsm8k(response: str, gold: str, score: float) -> None:
    assert make_reward(RewardConfig(name="gsm8k"))(response, row(gold)) == score


def test_gsm8k_answers_without_a_number_are_found_before_the_run() -> None:
    config = RewardConfig(name="gsm8k")
    check_answers(config, [row("He packs 15+16=<<15+16=31>>31 boxes.\n#### 31"), row("31")])
    with pytest.raises(UserError, match="2 rows(.|\n)*row 5: 'many'"):
        check_answers(config, [row("31"), row("many", 5), row(None, 6)])
    with pytest.raises(UserError, match="row 3"):
        make_reward(config)("#### 1", row("many"))


@pytest.mark.parametrize(("response", "answer", "score"), [
    (" 12\n", "12", 1), ("12", " 12 ", 1), ("1 2", "12", 0), ("A", "a", 0), ("", "12", 0), ("", None, 0), ("None", None, 0)])
def test_exact_match(response: str, answer: str | None, score: float) -> None:
    assert make_reward(RewardConfig())(response, row(answer)) == score


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_rewards.py").write_text(
        "def length(response, row):\n    return len(response) + row.index\n"
        "def one(response):\n    return 1.0\ndef broken(response, row):\n    raise KeyError('gold')\n"
        "def infinite(response, row):\n    return float('inf')\ndef text(response, row):\n    return 'good'\n"
        "async def later(response, row):\n    return 1.0\nvalue = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield
    sys.modules.pop("own_rewards", None)


def reward(name: str) -> Any:
    return make_reward(RewardConfig(name="function", function=name))


def test_a_users_function_is_found_in_the_working_directory(module: Any) -> None:
    assert reward("own_rewards:length")("abc", row("1")) == 6.0


@pytest.mark.parametrize(("path", "words"), [
    ("own_rewards.length", "write package.module:function"), ("absent_module:f", "no module named 'absent_module'"),
    ("own_rewards:lenght", "did you mean length?"), ("own_rewards:one", "called with .response, row."),
    ("own_rewards:later", "not a plain function"),
    ("own_rewards:value", "not a plain function")])
def test_functions_that_cannot_be_used_are_refused(module: Any, path: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        reward(path)


def test_values_that_are_no_reward_name_the_row(module: Any) -> None:
    for name, words in (("infinite", "inf for row 3"), ("text", "'good' for row 3")):
        with pytest.raises(UserError, match=words):
            reward(f"own_rewards:{name}")("abc", row("1"))
    with pytest.raises(KeyError) as error:
        reward("own_rewards:broken")("abc", row("1"))
    assert any("row 3" in note for note in error.value.__notes__)
    assert math.isfinite(reward("own_rewards:length")("", row(None)))

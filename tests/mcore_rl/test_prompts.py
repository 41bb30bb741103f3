"""Prompts from files, as `generate` and the benchmarks read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.prompts import read_prompts
from mcore_rl.tokens import character_tokenizer
from parallel.errors import UserError


def test_prompts_are_found_in_every_form(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcxy ")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] if m['role'] != 'user' else 'x' }}{{ m['content'] }}{% endfor %}a"
    files = {"rows.jsonl": '{"prompt": "ab"}\n{"prompt": "c"}\n', "lines.txt": "ab\n\nc\n", "gsm8k.jsonl": '{"question": "ab", "answer": "x"}\n{"question": "c"}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found = read_prompts(str(tmp_path / name), tokenizer)
        assert [(p.text, p.ids) for p in found] == [("ab", (4, 5)), ("c", (6,))]
        assert read_prompts(str(tmp_path / name), tokenizer, limit=1) == found[:1]
    (tmp_path / "feed.txt").write_text("ab\x0cc\n")
    assert [p.text for p in read_prompts(str(tmp_path / "feed.txt"), character_tokenizer("abc\x0c"))] == ["ab\x0cc"], "only a line feed ends a prompt"
    chat = read_prompts(str(tmp_path / "lines.txt"), tokenizer, chat=True, system="b")
    assert [p.ids for p in chat] == [tuple(tokenizer(text)["input_ids"]) for text in ("sbxaba", "sbxca")]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "ab"}]}))
    assert read_prompts(str(tmp_path / "chat.jsonl"), tokenizer)[0].ids == tuple(tokenizer("xaba")["input_ids"])
    assert read_prompts(str(tmp_path / "gsm8k.jsonl"), tokenizer, "answer", limit=1)[0].text == "x"


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    file = tmp_path / "rows.jsonl"
    for text, options, words in (('{"prompt": "a"}\n{"prompt": ""}', {}, "row 1.*empty"), ('{"prompt": "a"}\n{', {}, "row 1.*line 2"), ("", {}, "no prompts"),
                                 ('{"question": "a"}', {"field": "qestion"}, "did you mean 'question'"), ('{"text": "a"}', {}, "field 'prompt'"),
                                 ('{"prompt": "a"}', {"chat": True}, "no chat template")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            read_prompts(str(file), tokenizer, **options)  # type: ignore[arg-type]
    (tmp_path / "lines.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="UTF-8"):
        read_prompts(str(tmp_path / "lines.txt"), tokenizer)

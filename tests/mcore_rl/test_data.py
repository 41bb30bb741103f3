"""Rows become the same token ids on every path, bad rows are reported at once, and the order survives a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mcore_rl.config import DataConfig
from mcore_rl.data import PromptStream, load_rows, sft_examples
from mcore_rl.tokens import character_tokenizer, load_tokenizer
from parallel.errors import UserError

MESSAGES = [{"role": "user", "content": "add 2 and 3"}]
PLAIN_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
                  "{% if add_generation_prompt %}a:{% endif %}")


def bos_tokenizer(bos: str | None = "<s>") -> Any:
    """It puts <s> in front by itself, and its chat template writes <s> as well."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", "user", "assistant", ":", "add", "2", "and", "3", "5"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = ("{{ bos_token }} {% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
                               "{% if add_generation_prompt %}assistant : {% endif %}")
    return tokenizer


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(tmp_path: Path, rows: list[Any], tokenizer: Any = None, **options: Any) -> Any:
    return load_rows(DataConfig(train=jsonl(tmp_path / "d.jsonl", rows), **options), tokenizer or character_tokenizer("0123456789+=abc? "))


def test_chat_and_text_have_one_bos(tmp_path: Path) -> None:
    tokenizer = bos_tokenizer()
    (row,), _ = load(tmp_path, [{"prompt": MESSAGES, "answer": 5}], tokenizer, prompt_format="chat")
    assert row.prompt_ids == (0, 3, 5, 6, 7, 8, 9, 4, 5) and row.answer == "5"
    (as_text,), _ = load(tmp_path, [{"prompt": "add 2 and 3", "answer": "5"}], tokenizer, prompt_format="chat")
    assert as_text.prompt_ids == row.prompt_ids
    (raw,), _ = load(tmp_path, [{"prompt": "add 2 and 3", "answer": "5"}], tokenizer)
    assert raw.prompt_ids == (0, 6, 7, 8, 9)
    (twice,), _ = load(tmp_path, [{"prompt": "<s> add 2", "answer": "5"}], tokenizer)
    assert twice.prompt_ids == (0, 6, 7)
    (without,), _ = load(tmp_path, [{"prompt": MESSAGES, "answer": "5"}], bos_tokenizer(None), prompt_format="chat")
    assert "None" not in without.prompt_text and without.prompt_ids == (3, 5, 6, 7, 8, 9, 4, 5)
    pairs = DataConfig(train=jsonl(tmp_path / "s.jsonl", [{"prompt": MESSAGES, "response": "5"}]), prompt_format="chat")
    (example,), _ = sft_examples(pairs, tokenizer)
    assert example.token_ids == (0, 3, 5, 6, 7, 8, 9, 4, 5, 10, 1) and example.mask == (0,) * 9 + (1, 1)


def test_system_prompt_goes_in_front_once(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz:\n 0123456789")
    tokenizer.chat_template = PLAIN_TEMPLATE
    rows = [{"prompt": "hi", "answer": 1}, {"prompt": [{"role": "system", "content": "own"}, *MESSAGES], "answer": 1}]
    loaded, _ = load(tmp_path, rows, tokenizer, prompt_format="chat", system_prompt="be brief")
    assert [r.prompt_text for r in loaded] == ["<s>system:be brief\nuser:hi\na:", "<s>system:own\nuser:add 2 and 3\na:"]


def test_bad_rows_are_listed_at_once_or_dropped_and_counted(tmp_path: Path) -> None:
    def user(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    rows = [{"prompt": []}, {"prompt": None}, {"prompt": user("")}, {"prompt": user(None)}, {"prompt": "   "}, {},
            {"prompt": [{"role": "assistant", "content": "hi"}]}, {"prompt": user("ok"), "answer": None}, "{broken", "[1]",
            {"prompt": user("ok"), "answer": "1"}]
    rows = [{"answer": "1", **r} if isinstance(r, dict) and "answer" not in r else r for r in rows]
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz:\n")
    tokenizer.chat_template = PLAIN_TEMPLATE
    with pytest.raises(UserError) as error:
        load(tmp_path, rows, tokenizer, prompt_format="chat")
    message = str(error.value)
    assert "10 bad rows of 11" in message and all(f"row {i}: " in message for i in range(10)) and "row 10" not in message
    kept, report = load(tmp_path, rows, tokenizer, prompt_format="chat", bad_rows="drop")
    assert [r.index for r in kept] == [10] and len(report.bad) == 10 and "10 bad rows dropped" in report.text()
    assert "None" not in kept[0].prompt_text


def test_overlong_prompts_are_counted_or_refused_and_an_empty_set_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1=", "answer": "4"}]
    kept, report = load(tmp_path, rows, max_prompt_tokens=4)
    assert [r.index for r in kept] == [0] and report.overlong == (1,) and "1 overlong rows dropped" in report.text()
    with pytest.raises(UserError, match="max_prompt_tokens 4 .first: row 1"):
        load(tmp_path, rows, max_prompt_tokens=4, overlong="error")
    for empty in (rows, []):
        with pytest.raises(UserError, match="gives no prompts"):
            load(tmp_path, empty, max_prompt_tokens=2)
    with pytest.raises(UserError, match="'anwser'.*did you mean 'answer'"):
        load(tmp_path, rows, answer_field="anwser")
    with pytest.raises(UserError, match="does not exist"):
        load_rows(DataConfig(train=str(tmp_path / "absent.jsonl")), None)
    with pytest.raises(UserError, match="no chat template"):
        load(tmp_path, rows, prompt_format="chat")


def test_parquet_rows_are_plain_and_free_of_foreign_nulls(tmp_path: Path) -> None:
    def row(i: int, name: str, parameter: str) -> dict[str, Any]:
        return {"prompt": MESSAGES, "answer": "4", "extra": {"index": i, "tags": ["b", "c"][:i + 1]}, "schema": '{"default": null}',
                "tools": [{"name": name, "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}}}]}

    directory = tmp_path / "set"
    directory.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(0, "weather", "city"), row(1, "calc", "expr")]), directory / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(0, "clock", "zone")]), directory / "b.parquet")
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789:\n ")
    tokenizer.chat_template = "{% for t in tools %}{{ t['parameters']['properties'].keys() | join }}{% endfor %} " + PLAIN_TEMPLATE
    rows, _ = load_rows(DataConfig(train=str(directory), prompt_format="chat"), tokenizer)
    assert [r.fields["tools"][0]["parameters"]["properties"] for r in rows] == [{n: {"type": "string"}} for n in ("city", "expr", "zone")]
    assert [r.prompt_text.split(" ")[0] for r in rows] == ["city", "expr", "zone"] and [r.index for r in rows] == [0, 1, 2]
    assert isinstance(rows[0].fields["prompt"], list) and rows[1].fields["extra"]["tags"] == ["b", "c"]
    assert all(json.loads(json.dumps(r.fields)) == r.fields and r.fields["schema"] == '{"default": null}' for r in rows)


def test_tokenizers_are_read_from_the_model_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    character_tokenizer("0123456789+= \n").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("12 + 7=\n19")["input_ids"]
    assert len(ids) == 10 and tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12 + 7=\n19"


def stream(rows: int = 10, step: int = 2, seed: int = 7, shuffle: bool = True, fingerprint: str = "f") -> PromptStream:
    return PromptStream(rows, seed, step, shuffle, fingerprint)


def test_the_order_survives_resume_and_another_step_size() -> None:
    whole = stream().take(20)
    assert sorted(whole[:10]) == sorted(whole[10:]) == list(range(10)) and whole[:10] != whole[10:]
    assert stream(shuffle=False).take(12) == [*range(10), 0, 1] and stream(seed=8).take(10) != whole[:10]
    first = stream()
    assert [i for _ in range(3) for i in first.take()] == whole[:6]
    for step in (2, 4, 3):
        resumed = stream(step=step)
        resumed.load_state(json.loads(json.dumps(first.state())))
        assert resumed.take() + resumed.take(14 - step) == whole[6:20]
    assert (first.position, first.epoch) == (6, 0)


@pytest.mark.parametrize("changed", [{"rows": 12}, {"rows": 5}, {"fingerprint": "g"}, {"seed": 8}, {"shuffle": False}])
def test_resuming_on_other_data_is_refused(changed: dict[str, Any]) -> None:
    first = stream()
    first.take(6)
    with pytest.raises(UserError, match="cannot resume: .* position 6"):
        stream(**changed).load_state(first.state())


def test_the_fingerprint_sees_every_change_of_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    prints = {load(tmp_path, r)[1].fingerprint for r in (rows, rows[::-1], rows[:3], [{**rows[0], "answer": "9"}, *rows[1:]])}
    assert len(prints) == 4 and load(tmp_path, rows)[1].fingerprint in prints

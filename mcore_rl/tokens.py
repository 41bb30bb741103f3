"""Prompts and responses as token ids: the one place where text and chat messages meet the tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from mcore_rl.config.sections import DataConfig
from mcore_rl.readers import BadRow
from parallel.errors import UserError


def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a Hugging Face model directory. Raises UserError where there is none."""
    if not Path(directory).is_dir():
        raise UserError(f"model directory {str(directory)!r} does not exist; give a directory with config.json, *.safetensors and a "
                        "tokenizer")
    from transformers import AutoTokenizer

    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)  # our limit is data.max_prompt_tokens
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model directory {str(directory)!r} has no usable tokenizer (tokenizer.json, tokenizer_config.json): "
                        f"{reason}") from None
    return tokenizer


def character_tokenizer(characters: str) -> Any:
    """A tokenizer with one id per character, after <pad> 0, <s> 1, </s> 2 and <unk> 3; it adds nothing by itself.

    Save it with `.save_pretrained(directory)`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(characters)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)


def encode_prompt(tokenizer: Any, data: DataConfig, fields: dict[str, Any]) -> tuple[str, list[int]]:
    """(rendered prompt, token ids) of one row. Raises BadRow with the reason where it has no usable prompt.

    Chat: the template writes all special tokens, so the rendered text is encoded without adding any (else two BOS). Text:
    encoded as the tokenizer does by default.
    """
    prompt = fields.get(data.prompt_field)
    if prompt is None:
        raise BadRow(f"field {data.prompt_field!r} (the prompt) is missing or null")
    if data.prompt_format == "text":
        if not isinstance(prompt, str):
            raise BadRow(f"the prompt is a {type(prompt).__name__}, not text; for chat messages set data.prompt_format: chat")
        if not prompt.strip():
            raise BadRow("the prompt is empty")
        return prompt, encode_text(tokenizer, prompt)
    messages = _messages(prompt, data.system_prompt)
    text = render_chat(tokenizer, messages, fields.get("tools"))
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt: with the BOS the tokenizer adds, never two, and without an EOS after the prompt."""
    try:
        ids = list(tokenizer(text)["input_ids"])
    except (TypeError, UnicodeError):  # lone surrogates, which JSON can spell and no tokenizer takes
        raise BadRow("the prompt is not valid Unicode text") from None
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos] and text.startswith(tokenizer.bos_token):
        return ids[1:]
    if eos is not None and len(ids) > 1 and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
        return ids[:-1]
    return ids


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
    """Messages through the chat template, with the start of the assistant's turn; `variables` are for the template.

    Raises UserError without a template, BadRow where it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UserError("data.prompt_format is chat, but the tokenizer of model.path has no chat template; set data.prompt_format: text")
    if isinstance(tools, str):  # tool schemas kept as JSON text stay verbatim through parquet
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise BadRow(f"field 'tools' is text, but not JSON: {error.msg}") from None
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **variables))
    except (jinja2.TemplateError, TypeError) as error:
        raise BadRow(f"the chat template refuses the messages: {error}") from None


def encode_response(tokenizer: Any, response: Any) -> list[int]:
    """Token ids of a response followed by the end-of-sequence token."""
    if not isinstance(response, str) or not response.strip():
        raise BadRow("the response is missing, empty or not text")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer of model.path has no end-of-sequence token, so a response would never end; set eos_token in "
                        "tokenizer_config.json")
    return [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _messages(prompt: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadRow("the prompt is empty" if prompt in ([], {}) else
                     f"the prompt is a {type(prompt).__name__}, not text or a list of messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {number} of the prompt has no role")
        content = message.get("content")
        calls = bool(message.get("tool_calls"))  # an assistant turn may consist of calls alone
        if not calls and (content is None or (isinstance(content, str) and not content.strip()) or content == []):
            raise BadRow(f"message {number} of the prompt ({message['role']}) has no content")
    if prompt[-1]["role"] == "assistant":
        raise BadRow("the last message of the prompt is the assistant's; it must be one to answer")
    has_system = prompt[0]["role"] == "system"
    return [{"role": "system", "content": system_prompt}, *prompt] if system_prompt and not has_system else prompt

"""OpenAI's request JSON into what the engine takes. A parameter that is unknown, or known and not supported, is refused by name.

Source of names and defaults: https://platform.openai.com/docs/api-reference (completions, chat); beyond it, as vLLM names them: `top_k`,
`min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `return_token_ids`, `chat_template_kwargs`.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.readers import BadRow
from mcore_rl.tokens import encode_text, render_chat
from parallel.errors import UserError, nearest
from trtllm_rollout.protocol import Request, SamplingParams

MOST_CHOICES = 1024  # of one request: prompts x n
MOST_LOG_PROBS = 20

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "min_tokens")
_COMMON = ("model", "n", "seed", "stop", "stream", "stream_options", "max_tokens", "logprobs", "user", "stop_token_ids", "ignore_eos",
           "return_token_ids", *_SAMPLING)
_OWN = {"completions": ("prompt", "echo"), "chat": ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")}
# OpenAI's other parameters, and the values that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0), "logit_bias": ({},), "best_of": (1,), "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],),
    "tool_choice": ("none",), "functions": ([],), "function_call": ("none",), "parallel_tool_calls": (), "modalities": (["text"],),
    "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "service_tier": ("auto", "default"), "store": (False,),
    "metadata": ({},), "web_search_options": (), "prompt_cache_key": (), "safety_identifier": ()}


class BadRequest(ValueError):
    """The client's fault: HTTP `status`, and the parameter where one is to blame."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Serving:
    """What is served: `max_seq_len` tokens of prompt and answer, `stop_ids` end an answer."""

    name: str
    tokenizer: Any
    max_seq_len: int
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A request that can be submitted. `log_probs`: None, or how many alternatives are shown of every token."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    log_probs: int | None = None
    echo: bool = False
    token_ids: bool = False

    def requests(self, ids: Sequence[int]) -> list[Request]:
        """One engine request a prompt. Without a seed the random stream is a fresh one."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        return [Request(i, prompt, self.sampling, self.n, (seed, 0, k), every_token=self.stream)
                for k, (i, prompt) in enumerate(zip(ids, self.prompts, strict=True))]


class Fields:
    """The parameters of a request by type; null is as good as absent."""

    def __init__(self, body: Any, kind: str) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the request must be a JSON object")
        self._given = {name: value for name, value in body.items() if value is not None}
        known = (*_COMMON, *_OWN[kind])
        for name, value in self._given.items():
            if name in known:
                continue
            if name in _NEUTRAL or any(name in own for own in _OWN.values()):
                if not any(value == v and type(value) is type(v) for v in _NEUTRAL.get(name, ())):
                    raise BadRequest(f"parameter {name!r} is not supported here; leave it out", name)
                continue
            guess = nearest(name, known)
            raise BadRequest(f"unknown parameter {name!r}" + (f"; did you mean {guess!r}?" if guess else ""), name)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def raw(self, name: str) -> Any:
        return self._given.get(name)

    def whole(self, name: str, default: Any = None, least: int | None = None, most: int | None = None) -> Any:
        value = self._given.get(name, default)
        if value is default:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or least is not None and value < least or most is not None and value > most:
            limits = f" from {least}" if most is None and least is not None else f" from {least} to {most}" if most is not None else ""
            raise BadRequest(f"{name} is {value!r}; it must be a whole number{limits}", name)
        return value

    def number(self, name: str) -> float | int:
        value = self._given[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r}; it must be a number", name)
        return value

    def flag(self, name: str) -> bool:
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r}; it must be true or false", name)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._given.get(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise BadRequest(f"{name} is {value!r}; it must be a string that is not empty, or a list of such", name)
        return tuple(value)


def read_request(body: Any, kind: str, serving: Serving) -> Asked:
    """A body of /v1/completions ("completions") or /v1/chat/completions ("chat"). Raises BadRequest."""
    fields = Fields(body, kind)
    model = fields.raw("model")
    if model is None:
        raise BadRequest(f"parameter 'model' is missing; this server has {serving.name!r}", "model")
    if model != serving.name:
        raise BadRequest(f"the model {model!r} does not exist; this server has {serving.name!r}", "model", 404, "model_not_found")
    chat = kind == "chat"
    prompts = (_chat_prompt(fields, serving),) if chat else _prompts(fields.raw("prompt"), serving)
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts x n {n} are more than {MOST_CHOICES} answers; send several requests", "n")
    log_probs = _log_probs(fields, chat)
    options = fields.raw("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise BadRequest("stream_options may hold include_usage, true or false", "stream_options")
    echo = fields.flag("echo")
    if echo and log_probs:
        raise BadRequest("logprobs above 0 with echo: alternatives to the prompt's own tokens are not computed; set logprobs to 0", "logprobs")
    if echo and fields.flag("stream"):
        raise BadRequest("echo is not supported with stream; leave one out", "echo")
    sampling = _sampling(fields, serving, max(map(len, prompts)), log_probs, echo)
    return Asked(chat, prompts, sampling, n, fields.whole("seed"), fields.flag("stream"), bool(options.get("include_usage")), log_probs, echo,
                 fields.flag("return_token_ids"))


def _sampling(fields: Fields, serving: Serving, longest: int, log_probs: int | None, echo: bool) -> SamplingParams:
    values = {name: fields.number(name) for name in _SAMPLING if name in fields}
    if values.get("top_k") == -1:  # vLLM's "all"
        values["top_k"] = 0
    stop_ids = fields.raw("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(_is_id(i) for i in stop_ids):
        raise BadRequest("stop_token_ids must be a list of token ids", "stop_token_ids")
    ends = () if fields.flag("ignore_eos") else serving.stop_ids
    try:
        return SamplingParams(max_tokens=_max_tokens(fields, serving, longest), stop_token_ids=tuple(dict.fromkeys((*ends, *stop_ids))),
                              stop=fields.strings("stop"), top_log_probs=log_probs or 0, prompt_log_probs=echo and log_probs is not None, **values)
    except UserError as error:
        first = str(error).split()[0]
        raise BadRequest(str(error), first if first in fields else None) from None


def _max_tokens(fields: Fields, serving: Serving, longest: int) -> int:
    """What is asked for; else 16 for a completion (OpenAI's default) and what fits for a chat."""
    given = {name: fields.whole(name, None, 1) for name in ("max_tokens", "max_completion_tokens") if name in fields}
    if len(set(given.values())) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    room = serving.max_seq_len - longest
    if room < 1:
        raise BadRequest(f"the prompt has {longest} tokens; prompt and answer together may have {serving.max_seq_len}",
                         code="context_length_exceeded")
    if not given:
        return room if "messages" in fields else min(16, room)
    count = next(iter(given.values()))
    if count > room:
        raise BadRequest(f"{longest} prompt tokens + {count} tokens to generate are more than the {serving.max_seq_len} that fit; shorten the prompt "
                         f"or ask for at most {room}", next(iter(given)), code="context_length_exceeded")
    return int(count)


def _log_probs(fields: Fields, chat: bool) -> int | None:
    if not chat:
        return fields.whole("logprobs", None, 0, MOST_LOG_PROBS)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MOST_LOG_PROBS)
    if top is not None and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _prompts(prompt: Any, serving: Serving) -> tuple[tuple[int, ...], ...]:
    """Text, token ids, or a list of either."""
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(_is_id(p) for p in prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt is missing or empty; give a string, a list of strings, a list of token ids or a list of such lists", "prompt")
    return tuple(_encode(one, serving) for one in prompt)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _encode(prompt: Any, serving: Serving) -> tuple[int, ...]:
    if isinstance(prompt, list) and all(_is_id(p) for p in prompt):
        ids = tuple(prompt)
    elif isinstance(prompt, str):
        try:
            ids = tuple(encode_text(serving.tokenizer, prompt))
        except BadRow as error:
            raise BadRequest(str(error), "prompt") from None
        if not ids and serving.tokenizer.bos_token_id is not None:
            ids = (serving.tokenizer.bos_token_id,)
    else:
        raise BadRequest(f"a prompt is a {type(prompt).__name__}; it must be a string or a list of token ids", "prompt")
    if not ids:
        raise BadRequest("the prompt is empty; give at least one token", "prompt")
    return ids


def _chat_prompt(fields: Fields, serving: Serving) -> tuple[int, ...]:
    """Messages through the chat template, which writes all special tokens itself: the text is encoded without adding any."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise BadRequest("messages must be a list, not empty, of objects with a role", "messages")
    if not serving.tokenizer.chat_template:
        raise BadRequest(f"the tokenizer of {serving.name!r} has no chat template; use /v1/completions", "messages")
    options = fields.raw("chat_template_kwargs") or {}
    # a template of the client's, above all, would be a program of its own
    taken = {"messages", *inspect.signature(serving.tokenizer.apply_chat_template).parameters}
    if not isinstance(options, dict) or set(options) & taken:
        raise BadRequest("chat_template_kwargs must be an object with variables of the chat template", "chat_template_kwargs")
    try:
        text = render_chat(serving.tokenizer, [{**m, "content": _content(m.get("content"))} for m in messages], **options)
    except BadRow as error:
        raise BadRequest(str(error), "messages") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest("the messages are not valid Unicode text", "messages") from None
    return tuple(serving.tokenizer(text, add_special_tokens=False)["input_ids"])


def _content(content: Any) -> Any:
    """Text, also where it comes in parts."""
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise BadRequest(f"a message's content is a {type(content).__name__}; it must be text", "messages")
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"a part of a message's content is {kind!r}; only text is supported", "messages")
    return "".join(part["text"] for part in content)

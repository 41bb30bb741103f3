"""What the engine made, in OpenAI's JSON.

Log-probs are raw (temperature 1, before penalties and cuts), as OpenAI's and vLLM's. With `return_token_ids` a choice also has `token_ids`,
`prompt_token_ids`, `log_probs` (at the sampling temperature: what a trainer computes again) and `weights_versions`, one a token.
`system_fingerprint` names the version of the weights.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.server.asked import Asked, Serving
from mcore_rl.server.text import TextStream, visible
from trtllm_rollout.protocol import Completion, Progress


@dataclass
class Answer:
    """The answer to one request, as one object (`whole`) or in chunks. `version` says that of the engine's weights now, None while they change."""

    asked: Asked
    serving: Serving
    version: Callable[[], int | None]
    first_id: int
    id: str = ""
    created: int = 0
    done: dict[int, Completion] = field(default_factory=dict)
    _streams: dict[int, TextStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.asked.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    @property
    def complete(self) -> bool:
        return len(self.done) == self.asked.n * len(self.asked.prompts)

    def add(self, event: Completion | Progress) -> list[dict[str, Any]]:
        """Take in what the engine gave; for a stream, the chunks to send."""
        index = (event.request_id - self.first_id) * self.asked.n + event.sample
        if isinstance(event, Completion):
            self.done[index] = event
        if not self.asked.stream:
            return []
        chunks = []
        if index not in self._streams:
            self._streams[index] = TextStream(self.serving.tokenizer, self.asked.sampling.stop)
            if self.asked.chat:
                chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        stream = self._streams[index]
        if isinstance(event, Progress):
            if piece := stream.add(event.token_ids):
                chunks.append(self._chunk(index, {"content": piece}))
            return chunks
        rest = stream.finish(visible(self.serving.tokenizer, event.token_ids, event.stop_reason))
        # the log-probs of all tokens come with the last chunk: a Progress does not know the alternatives
        return [*chunks, self._chunk(index, {"content": rest} if rest else {}, event)]

    def whole(self) -> dict[str, Any]:
        """The response object."""
        choices = []
        for index, done in sorted(self.done.items()):
            text = visible(self.serving.tokenizer, done.token_ids, done.stop_reason)
            if self.asked.chat:
                choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
            else:
                choice = {"text": self._echo(index) + text}
            choices.append({"index": index, **choice, **self._end(index, done)})
        return {**self._head("chat.completion" if self.asked.chat else "text_completion"), "choices": choices, "usage": self.usage()}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the usage, for `stream_options.include_usage`."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt, made = sum(map(len, self.asked.prompts)), sum(len(c.token_ids) for c in self.done.values())
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        made = [c.versions[-1] for c in self.done.values() if c.versions]
        version = max(made) if made else self.version()
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.name,
                "system_fingerprint": None if version is None else f"weights-{version}"}

    def _chunk(self, index: int, delta: dict[str, Any], done: Completion | None = None) -> dict[str, Any]:
        choice = {"delta": delta} if self.asked.chat else {"text": delta.get("content", "")}
        end = self._end(index, done) if done else {"finish_reason": None, "logprobs": None}
        chunk = {**self._head(self._chunk_kind), "choices": [{"index": index, **choice, **end}]}
        return {**chunk, "usage": None} if self.asked.include_usage else chunk

    def _echo(self, index: int) -> str:
        return str(self.serving.tokenizer.decode(list(self.asked.prompts[index // self.asked.n]))) if self.asked.echo else ""

    def _end(self, index: int, done: Completion) -> dict[str, Any]:
        """What a finished choice has beside its text."""
        out: dict[str, Any] = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason, "logprobs": None}
        if self.asked.log_probs is not None:
            out["logprobs"] = self._chat_log_probs(done) if self.asked.chat else self._log_probs(index, done)
        if self.asked.token_ids:
            out |= {"token_ids": list(done.token_ids), "prompt_token_ids": list(self.asked.prompts[index // self.asked.n]),
                    "log_probs": [finite(v) for v in done.log_probs], "weights_versions": list(done.versions)}
        return out

    def _word(self, token: int) -> str:
        return str(self.serving.tokenizer.decode([token]))

    def _chat_log_probs(self, done: Completion) -> dict[str, Any]:
        def entry(token: int, log_prob: float) -> dict[str, Any]:
            word = self._word(token)
            return {"token": word, "logprob": finite(log_prob), "bytes": list(word.encode("utf-8", "replace"))}

        tops: Sequence[Any] = done.top_log_probs or [()] * len(done.token_ids)
        return {"content": [{**entry(token, log_prob), "top_logprobs": [entry(*pair) for pair in top]}
                            for token, log_prob, top in zip(done.token_ids, done.raw_log_probs, tops, strict=True)], "refusal": None}

    def _log_probs(self, index: int, done: Completion) -> dict[str, Any]:
        ids, values = list(done.token_ids), [finite(v) for v in done.raw_log_probs]
        tops: list[dict[str, float] | None] | None = None
        if self.asked.log_probs:
            # the sampled token is always there, as OpenAI says; of two ids with one text the likelier one is shown
            tops = [{self._word(token): value, **{self._word(i): finite(v) for i, v in reversed(top)}}
                    for token, value, top in zip(ids, values, done.top_log_probs, strict=True)]
        if self.asked.echo:
            prompt = list(self.asked.prompts[index // self.asked.n])
            ids, values = prompt + ids, [None, *(finite(v) for v in done.prompt_log_probs), *values]  # type: ignore[list-item]
        words = [self._word(token) for token in ids]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": tops,
                "text_offset": list(itertools.accumulate(map(len, words[:-1]), initial=0)) if words else []}


def finite(value: float) -> float:
    """JSON has no infinity: a token that was forced against probability 0 gets -9999, as OpenAI writes it."""
    return value if value > -9999.0 else -9999.0


def error_object(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_json(value: Any) -> bytes:
    """UTF-8, also where a client's own text, quoted in an error, holds half a surrogate pair."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def server_sent(event: dict[str, Any] | None) -> bytes:
    """One server-sent event; None ends the stream."""
    return b"data: " + (as_json(event) if event is not None else b"[DONE]") + b"\n\n"

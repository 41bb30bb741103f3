"""Token ids into text as they come, and text without the stop string that ended it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_rollout.embedded.stop_strings import completed_at

INCOMPLETE = "\ufffd"  # what decoding gives for the first bytes of a character


def visible(tokenizer: Any, ids: Sequence[int], stop_reason: int | str | None) -> str:
    """The text of a finished sample, special tokens left out, up to the stop string where one ended it."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    if not isinstance(stop_reason, str):
        return text
    at = completed_at(stop_reason, text, str(tokenizer.decode(list(ids[:-1]), skip_special_tokens=True)))
    return text if at < 0 else text[:at]


class TextStream:
    """The text of one sample, in pieces whose sum is that of the whole.

    A piece is held back while it ends within a character, and as much of the text as may be the beginning of a string of `stop`.
    A few tokens are decoded again with each piece (as text-generation-inference and vLLM do), because how a token is written may depend
    on the one before.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._start = self._read = 0  # ids before `_read` are written; decoding begins at `_start`
        self._text, self._sent, self._end = "", 0, 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that can be shown now: nothing of a stop string that `ids` may have completed, which the end of the sample will tell."""
        self._ids += ids
        before = self._decode(self._ids[self._start:self._read])
        now = self._decode(self._ids[self._start:])
        if len(now) > len(before) and not now.endswith(INCOMPLETE):
            old = len(self._text)
            self._text += now[len(before):]
            self._start, self._read = self._read, len(self._ids)
            self._end = min((self._safe(s, old) for s in self._stop), default=len(self._text))
        return self._send(self._end)

    def _safe(self, stop: str, old: int) -> int:
        """Where `stop` begins in what is new after `old`, or could begin."""
        at = self._text.find(stop, max(0, old - len(stop) + 1))
        return at if at >= 0 else len(self._text) - len(stop) + 1

    def finish(self, whole: str) -> str:
        """The rest, up to the end of `whole`, which is the text of all tokens (cut where a stop string began)."""
        self._text = whole
        return self._send(len(whole))

    def _send(self, end: int) -> str:
        piece = self._text[self._sent:end] if end > self._sent else ""
        self._sent += len(piece)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

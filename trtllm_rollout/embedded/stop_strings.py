"""Stop strings: found in the text of a sample's last tokens, without decoding the whole answer for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

MARGIN = 4  # characters: a text decoded from the middle may begin with the rest of one


def met_stop(tokens: Sequence[int], stops: Sequence[str], detokenize: Callable[[Sequence[int]], str]) -> str | None:
    """The first of `stops` that the last of `tokens` completed; None where it completed none.

    To be asked after every token: a string that was complete before would have ended the text then, or came too early to (`min_tokens`).
    """
    longest = max(map(len, stops))
    count = longest + MARGIN  # most tokens are a character or more
    while True:
        text, before = detokenize(tokens[-count:]), detokenize(tokens[-count:-1])
        if count >= len(tokens) or len(before) >= longest + MARGIN:
            return next((stop for stop in stops if completed_at(stop, text, before) >= 0), None)
        count *= 2


def completed_at(stop: str, text: str, before: str) -> int:
    """Where in `text` the first `stop` begins that was not complete in `before`, the text without its last token; -1 where there is none.

    What the last token changed may begin before the end of `before`: the first bytes of a character are shown as another character.
    """
    return text.find(stop, max(0, len(commonprefix((before, text))) - len(stop) + 1))

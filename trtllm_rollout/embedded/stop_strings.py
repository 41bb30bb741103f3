"""Stop strings: found in the text of a sample's last tokens, without decoding the whole answer for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 4  # characters: a text decoded from the middle may begin with the rest of one


def met_stop(tokens: Sequence[int], stops: Sequence[str], detokenize: Callable[[Sequence[int]], str]) -> str | None:
    """The first of `stops` that the text of `tokens` holds, if its last token completed it; None where it holds none.

    To be asked after every token: a string that the text held before its last token would have ended it then.
    """
    longest = max(map(len, stops))
    count = longest + MARGIN  # most tokens are a character or more
    while True:
        text = detokenize(tokens[-count:])
        if count >= len(tokens) or len(text) >= longest + MARGIN:
            return next((stop for stop in stops if stop in text), None)
        count *= 2

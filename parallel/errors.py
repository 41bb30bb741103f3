"""The one error that means "what the user gave cannot be used"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the thing, the value, what is allowed and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that is most like `word`, or None where nothing is close."""
    by_lower = {a.lower(): a for a in allowed}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None

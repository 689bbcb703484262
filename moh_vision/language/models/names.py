"""Names that a user mistyped."""

from difflib import get_close_matches
from typing import Iterable


def closest(name: str, allowed: Iterable[str]) -> str:
    """'did you mean ...', or all that is allowed where nothing is near."""
    allowed = list(allowed)
    near = get_close_matches(name, allowed, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"only {', '.join(allowed)}"

"""What to say about a name that is not known."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def unknown(what: str, name: object, known: Collection[str]) -> str:
    """A sentence that names the choices, and the nearest of them when one is near.

    Args:
        what: what the name stands for, such as "schedule".
        name: what was given.
        known: the names that exist.
    """
    by_lower_case = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), by_lower_case, n=1)
    hint = f"; did you mean {by_lower_case[near[0]]!r}?" if near else ""
    return f"unknown {what} {name!r}, expected one of {', '.join(map(repr, known))}{hint}"

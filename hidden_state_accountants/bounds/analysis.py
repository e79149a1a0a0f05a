"""The two ways to read a paper: what is proved, and what is printed."""

from __future__ import annotations

from typing import Any

SOUND, PUBLISHED = "sound", "published"


def check_analysis(instance: Any, attribute: Any, value: Any) -> None:
    """An attrs validator for an `analysis` field."""
    if value not in (SOUND, PUBLISHED):
        raise ValueError(f'Expected analysis to be "sound" or "published", got {value!r}.')

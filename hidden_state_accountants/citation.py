"""The papers that the theorems come from."""

from __future__ import annotations

import attrs


@attrs.frozen
class Citation:
    """Where a bound comes from."""

    authors: str
    theorem: str
    arxiv: str | None = None

    def __str__(self) -> str:
        source = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, {self.theorem}{source}"

"""The command `hsa`; needs the extra `cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print(
            "hsa: the command line needs typer and rich: "
            "pip install 'hidden-state-accountants[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from hidden_state_accountants.cli.app import run

    sys.exit(run(sys.argv[1:]))

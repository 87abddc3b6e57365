"""How a rank refuses: one line, and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REFUSED = 2
DISAGREE = 3


@contextmanager
def refusing() -> Iterator[None]:
    """Turns a ValueError about what was asked for into one line on standard error and exit status 2."""
    try:
        yield
    except ValueError as error:
        print(f"flashoverlap train: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(REFUSED) from None

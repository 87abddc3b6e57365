"""PeerError, and how errors from below are worded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class PeerError(RuntimeError):
    """A peer died, stalled past the time-out, or refused the call; the message names it."""


@contextmanager
def naming(op: str) -> Iterator[None]:
    """Puts the public name of the operator in front of every PeerError."""
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{op}: {error}") from error


def reason(error: BaseException) -> str:
    """The first line of an error, without gloo's file names and good advice."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = re.sub(r"^\[\S+:\d+\] ", "", line)
    return line.partition(". This is typically caused")[0]

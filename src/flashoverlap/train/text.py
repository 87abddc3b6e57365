"""Text as tokens: every byte is one, so that any UTF-8 text serves and nothing has to be downloaded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 256
# of Python's library: what does not belong to it, tests, and tables rather than programs
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """Bytes, and the batches that are drawn from them.

    Args:
        name: where they come from.
        content: all of them.
    """

    name: str
    content: bytes

    @staticmethod
    def read(data: Path | None) -> Text:
        """Reads a file, a folder with all files below it in the order of their names, or the library's sources.

        Hidden files are left out; so are, of the library's sources, tests, tables and files that are not UTF-8.

        Raises:
            ValueError: nothing there, nothing in it, or not UTF-8; the message has the path.
        """
        if data is None:
            content = b"\n".join(_library())
            if not content:
                raise ValueError("Python's standard library has no sources here; give a text with --data")
            return Text("Python's standard library", content)
        if data.is_dir():
            files = [file for file in sorted(data.rglob("*")) if file.is_file() and not _hidden(file, data)]
        elif data.is_file():
            files = [data]
        else:
            raise ValueError(f"--data {data}: no such file or folder")
        content = b"\n".join(_read(file) for file in files)
        if not content:
            raise ValueError(f"--data {data}: {'no text in the folder' if data.is_dir() else 'the file is empty'}")
        return Text(str(data), content)

    def check(self, tokens: int, batch: str) -> None:
        """Raises ValueError where there are too few tokens for one step."""
        if len(self.content) < tokens:
            raise ValueError(f"{self.name} has {len(self.content)} tokens (bytes); one step takes {tokens} ({batch})")

    def step(self, number: int, micro_batches: int, sequences: int, tokens: int, seed: int) -> Iterator[np.ndarray]:
        """The micro-batches of a step: int64 ``[sequences, tokens]``, sequences from places drawn at random.

        They depend on the arguments alone, not on what was drawn before: a resumed run sees what it would have seen.
        """
        whole = np.frombuffer(self.content, dtype=np.uint8)
        draw = np.random.default_rng((seed, number))
        for starts in draw.integers(0, len(whole) - tokens + 1, (micro_batches, sequences)):
            yield np.stack([whole[start : start + tokens] for start in starts]).astype(np.int64)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _read(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        content.decode("utf-8")
    except OSError as error:
        raise ValueError(f"--data {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {file}: not UTF-8 (byte {error.start})") from None
    return content


def _library() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not _LEFT_OUT & set(file.relative_to(root).parts):
            content = file.read_bytes()
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                continue  # a source in another encoding, which Python allows
            yield content

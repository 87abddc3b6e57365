"""Text to tokens and back, piece by piece: bytes, or the tokenizer that lies beside a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BYTES = 256
_OLDER = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of a character whose bytes are not all there


class Vocabulary(ABC):
    """What text is made of.

    Attributes:
        context: tokens in front of a piece that its text may depend on.
    """

    context: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text becomes U+FFFD."""


class ByteVocabulary(Vocabulary):
    """A token is a byte of UTF-8. Tokens from 256 on stand for no text."""

    context = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")


class TokenizerVocabulary(Vocabulary):
    """A ``tokenizer.json``, read by the tokenizers library."""

    context = 5  # enough for word marks, and for characters of several byte tokens

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} cannot be read as a tokenizer: {' '.join(str(error).split())}") from None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def vocabulary_of(folder: Path, size: int | None) -> Vocabulary:
    """The vocabulary of a model folder; bytes where it holds no tokenizer.

    Args:
        folder: of the model.
        size: of the model's vocabulary, where it is known.

    Raises:
        ValueError: the tokenizer cannot be read, or the model has too few tokens for bytes.
    """
    file = folder / "tokenizer.json"
    if file.exists():
        return TokenizerVocabulary(file)
    older = [name for name in _OLDER if (folder / name).exists()]
    if older:
        raise ValueError(
            f"{folder} has {', '.join(older)} but no tokenizer.json; write one with "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    if size is not None and size < _BYTES:
        raise ValueError(
            f"{folder} has no tokenizer.json, and its vocabulary of {size} is below the {_BYTES} that bytes need"
        )
    return ByteVocabulary()


def encode_prompt(vocabulary: Vocabulary, prompt: str, size: int | None) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ValueError: there are none, the prompt is no text, or the model knows fewer tokens than the vocabulary.
    """
    try:
        tokens = vocabulary.encode(prompt)
    except UnicodeEncodeError:
        raise ValueError(f"--prompt {prompt!r} is not valid UTF-8") from None
    if not tokens:
        raise ValueError(f"--prompt {prompt!r} has no tokens; at least one is needed to go on from")
    if size is not None and max(tokens) >= size:
        raise ValueError(
            f"the tokenizer gives token {max(tokens)}, beyond the model's vocabulary of {size}: they do not belong "
            "together"
        )
    return tokens


class TextStream:
    """Text of tokens that come one by one, in pieces that never cut a character.

    Args:
        vocabulary: of the tokens.
        prompt: tokens before the first one.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        context = vocabulary.context
        self._tokens = list(prompt[-context:]) if context else []
        self._begin, self._shown = 0, len(self._tokens)  # a window of tokens, and how many of them are text already

    def add(self, token: int) -> str:
        """The text that a further token completes; "" while a character waits for the rest of its bytes."""
        self._tokens.append(token)
        piece = self._piece()
        if not piece or piece.endswith(_UNFINISHED):
            return ""
        self._begin, self._shown = self._shown, len(self._tokens)
        return piece

    def end(self) -> str:
        """What is left once no more tokens come."""
        return self._piece()

    def _piece(self) -> str:
        before = self._vocabulary.decode(self._tokens[self._begin : self._shown])
        return self._vocabulary.decode(self._tokens[self._begin :])[len(before) :]

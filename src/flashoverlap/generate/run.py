"""Starts the ranks of a generation in a lab, and shows the text as it comes."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..lab import Lab, LabError
from .folder import ModelFolder, read_folder
from .options import Options
from .text import TextStream, Vocabulary, encode_prompt, vocabulary_of

_ENV = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Outcome:
    """What a generation gave.

    Attributes:
        result: the JSON file's content.
        records: of each phase, what the report had of rank 0's operators.
    """

    result: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Prepared:
    """All that is known before a rank starts."""

    options: Options
    folder: ModelFolder
    vocabulary: Vocabulary
    prompt: list[int]


def prepare(options: Options) -> Prepared:
    """Looks at the checkpoint and turns the prompt into tokens, without torch.

    Raises:
        ValueError: something is missing or does not fit; the message says what.
    """
    if find_spec("transformers") is None:
        raise ValueError("transformers is not installed, and models are built by it: pip install 'flashoverlap[hf]'")
    folder = read_folder(Path(options.checkpoint))
    vocabulary = vocabulary_of(folder.path, folder.vocab_size)
    prompt = encode_prompt(vocabulary, options.prompt, folder.vocab_size)
    folder.check_length(len(prompt), options.tokens)
    return Prepared(options, folder, vocabulary, prompt)


def run(prepared: Prepared, show: Callable[[str], None], timeout_s: float | None = None) -> Outcome:
    """Generates; ``show`` gets the text piece by piece.

    Raises:
        ValueError: the ranks refused the checkpoint; the message says why.
        LabError: the lab cannot be built here, a rank failed, or time ran out.
    """
    options = prepared.options
    stream = _Tokens(TextStream(prepared.vocabulary, prepared.prompt), show)
    with tempfile.TemporaryDirectory(prefix="flashoverlap-") as name, Lab(options.ranks, options.link) as lab:
        directory = Path(name)
        (directory / "task.json").write_text(json.dumps(_task(prepared)), encoding="utf-8")
        command = [sys.executable, "-m", "flashoverlap.generate.worker", str(directory)]
        unread = io.StringIO()  # an error repeats what was said last
        try:
            lab.run(command, env=_ENV, timeout_s=timeout_s, stdout=stream, stderr=unread, prefix=False)
        except LabError:
            refused = sorted(directory.glob("refused.*"))
            if refused:
                raise ValueError(refused[0].read_text(encoding="utf-8")) from None
            raise
        made = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    stream.finish()
    return Outcome(_result(prepared, made, stream.text), made["records"])


def _task(prepared: Prepared) -> dict[str, Any]:
    options, folder = prepared.options, prepared.folder
    return {
        "checkpoint": str(folder.path),
        "prompt": prepared.prompt,
        "tokens": options.tokens,
        "end_tokens": folder.end_tokens,
        "sampling": asdict(options.sampling),
        "dtype": options.dtype,
        "overlap": options.overlap,
    }


def _result(prepared: Prepared, made: dict[str, Any], text: str) -> dict[str, Any]:
    tokens = made["tokens"]
    return {
        "schema": 1,
        "ranks": prepared.options.ranks,
        "prompt_tokens": len(prepared.prompt),
        "tokens": tokens,
        "text": text,
        "prefill_seconds": made["prefill_s"],
        "decode_seconds_per_token": made["decode_s"] / (len(tokens) - 1) if len(tokens) > 1 else None,
        "checkpoint": prepared.options.checkpoint,
    }


class _Tokens(io.StringIO):
    """What the ranks print: tokens of rank 0 become text, and all else is left aside."""

    def __init__(self, stream: TextStream, show: Callable[[str], None]) -> None:
        super().__init__()
        self._stream, self._show = stream, show
        self.text = ""

    def write(self, lines: str) -> int:
        for line in lines.splitlines():
            if line.startswith('{"token": '):
                self._pass_on(self._stream.add(json.loads(line)["token"]))
        return len(lines)

    def finish(self) -> None:
        """Passes on what still waited for the rest of a character."""
        self._pass_on(self._stream.end())

    def _pass_on(self, piece: str) -> None:
        self.text += piece
        if piece:
            self._show(piece)

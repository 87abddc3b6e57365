"""What commands say of arguments in one way: options that are declared once, in a dataclass, and what they refuse.

A field is an option where it is annotated with one; its default is the option's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def whole(text: str | int) -> int:
    """A whole number, or a usage error that says what was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def count(text: str) -> Any:
    """An option that is a whole number; ``text`` is its help."""
    return typer.Option(help=text, metavar="N", parser=whole)


def words(text: str) -> Any:
    """An option that is some words, with commas between."""

    def split(given: str | tuple[str, ...]) -> tuple[str, ...]:
        parts = given.split(",") if isinstance(given, str) else given
        return tuple(part.strip() for part in parts if part.strip())

    return typer.Option(help=text, metavar="NAME,...", parser=split)


def options_of(*classes: type[Any]) -> dict[str, inspect.Parameter]:
    """The fields of dataclasses that are options, as parameters of a command.

    Where classes have an option with several defaults, that of the command is None: each class then has its own.
    """
    found: dict[str, inspect.Parameter] = {}
    for each in classes:
        hints = get_type_hints(each, include_extras=True)
        for field in fields(each):
            hint = hints[field.name]
            if get_origin(hint) is not Annotated:
                continue
            kind, option = get_args(hint)[:2]
            if get_origin(kind) is tuple:  # or typer would want as many words, with blanks between
                hint = Annotated[Any, option]
            new = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
            known = found.setdefault(field.name, new)
            if known.default != new.default:
                found[field.name] = known.replace(default=None, annotation=Annotated[Any, option])
    return found


def taking(*classes: type[Any], without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function of ``**chosen`` all options of these classes as parameters, for typer to make a command of."""

    def signed(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.kind != each.VAR_KEYWORD]
        parameters += [each for name, each in options_of(*classes).items() if name not in without]
        function.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        return function

    return signed


def check_writable(file: Path, made: Path | None = None) -> None:
    """Raises ValueError for a file that could not be written; ``made`` is a folder that is yet to be made."""
    if made is not None and file.parent == made and not made.exists():
        return
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no directory {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a directory")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written")

"""Modules that hold connections to other processes: how they are copied, and that they are not pickled."""

from __future__ import annotations

import copy
from typing import Any, NoReturn


class Connected:
    """Mixed into modules: a deep copy has attributes of its own, and pickling is refused.

    What cannot be copied, as a process group, is shared by the copies: its holder's ``__deepcopy__`` returns itself.
    """

    cannot_be_pickled = ""
    """The error of pickling, with what to do instead."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(self.cannot_be_pickled)

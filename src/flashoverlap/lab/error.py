"""The one error of the lab."""


class LabError(RuntimeError):
    """The lab could not be built, or a rank in it failed.

    Attributes:
        rank: the rank that failed first; None where no single rank did (no namespaces here, time ran out).
        exit_code: its exit code, negative for a signal as in `subprocess`; None where there is none.
        tail: the last lines of its output, standard output and standard error as they came.
    """

    def __init__(self, message: str, *, rank: int | None = None, exit_code: int | None = None, tail: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.tail = tail

    @property
    def exit_status(self) -> int:
        """What a shell would show for this failure: the exit code, 128 + signal, or 1. Never zero."""
        if not self.exit_code:
            return 1
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code

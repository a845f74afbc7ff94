"""Expected failures. All else that a stage raises is a bug, and is reported as one."""

from osprey_api.conditions import FailureReason


class StageError(Exception):
    """A failure with a closed reason and a sentence for a person: what is wrong, and what to write instead.

    The runner turns it into the `Outcome` in the termination message and into the exit code.
    """

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(reason, message)  # both, so that it survives pickling between processes
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

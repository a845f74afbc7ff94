"""Expected failures of training: a closed reason and a sentence that says what to write instead."""

from osprey_api.conditions import FailureReason


class TrainerError(Exception):
    """An input or a run that is wrong in a way the user can mend.

    Attributes:
        reason: the closed reason, for the condition of the resource.
    """

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

"""Expected failures of training."""

from osprey_runtime.errors import StageError


class TrainerError(StageError):
    """A model, its data or its training is wrong in a way that the user can mend; see `StageError`."""

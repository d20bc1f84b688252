"""What keeps the kernels from being built."""


class BuildProblemError(Exception):
    """The kernels cannot be built here.

    Args:
        reason: Why, in one line, and what would help.
        details: What a compiler printed, or where was searched.
    """

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details

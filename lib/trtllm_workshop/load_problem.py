"""The one error of the measuring client that is made for its reader; apart, so that a command line need not load the client."""


class LoadProblem(ValueError):
    """A load that cannot be run as asked; nothing was sent."""

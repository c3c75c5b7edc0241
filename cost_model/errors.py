"""Every error that autoshard raises on purpose. All derive from `AutoshardError`."""


class AutoshardError(Exception):
    """Base of all errors raised by autoshard, passes and cost_model."""


class CaptureError(AutoshardError):
    """The model could not be traced to one graph."""


class ShardingError(AutoshardError, ValueError):
    """A pin, placement, mesh or input asks for a sharding that cannot be."""


class InfeasibleError(AutoshardError):
    """No plan satisfies the pins and the memory limit."""


class UnsupportedOpError(AutoshardError):
    """An op, collective or dtype that autoshard cannot handle."""


class ProfileError(AutoshardError, ValueError):
    """A bandwidth profile is malformed, impossible, or lacks a needed measurement."""


class PlanError(AutoshardError, ValueError):
    """A plan is malformed, stale, or belongs to another model or mesh."""


class RankError(AutoshardError):
    """The ranks do different things, or one of them is gone. Every rank raises it, and nothing parallel goes on.

    No ValueError, as errors of arguments and files are: an `except ValueError` that skips a batch must not take it.
    """

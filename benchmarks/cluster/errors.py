"""What the emulated cluster raises."""

from __future__ import annotations

__all__ = ["ClusterError", "NoNamespaces"]


class ClusterError(Exception):
    """An argument is wrong, a command of the set-up failed, or the program failed on some host."""


class NoNamespaces(ClusterError):
    """This machine or this user cannot make network namespaces."""

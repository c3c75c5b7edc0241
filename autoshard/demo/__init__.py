"""`autoshard demo`: a small GPT on 4 local ranks, beside the same training in one process."""

from autoshard.demo.run import run_demo

__all__ = ["run_demo"]

"""What hooks leave behind while gradients are computed, which a compiled backward cannot repeat."""

from __future__ import annotations

from collections.abc import Iterable

from cost_model.errors import CaptureError
from passes.capture.places import Attribute, Incremented, Place
from passes.capture.snapshot import Snapshot

__all__ = ["check_backward_writes"]


def check_backward_writes(before: Snapshot, forward: Iterable[Place]) -> None:
    """Nothing of the model's, and nothing that its hooks hold on to, may differ from `before` after a traced backward.

    forward: where the forward leaves something, which happens at each call. Checkpointing runs parts of the forward
    again in the backward, so these places do not count. Raises CaptureError that names the place.
    """
    known = {_name(place) for place in forward}
    for place, _ in before.changes():
        name = _name(place)
        if name not in known:
            raise CaptureError(
                f"cannot capture: a hook leaves something in {name} during the backward, which a compiled step cannot "
                "repeat\n  try: a hook of the parameter (register_hook, register_post_accumulate_grad_hook), or "
                "torch.autograd.grad in the forward and return the gradient"
            )


def _name(place: Place) -> str:
    """The attribute, or the list or dict."""
    holder = str(getattr(place, "holder", type(place).__name__))
    return (
        f"{holder}.{place.name}".removeprefix(".") if isinstance(place, (Attribute, Incremented)) else holder
    )

"""From a module and one call of it to a `JointGraph`, and between a call's structure and flat tensors."""

from passes.capture.call import CallSpec, flatten_call
from passes.capture.capture import Captured, capture

__all__ = ["CallSpec", "Captured", "capture", "flatten_call"]

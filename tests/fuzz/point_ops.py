"""Pointwise ops, as forms."""

# ruff: noqa: E501
from __future__ import annotations

__all__ = ["BINARY", "MASKS", "UNARY"]

UNARY = (
    "torch.tanh({0})", "{0}.sigmoid()", "F.gelu({0})", "F.silu({0})", "{0}.relu()", "{0}.abs()", "{0}.sin()",
    "({0}.clamp(-2, 2)).exp()", "{0}.abs().log1p()", "({0}.square() + 1).sqrt()", "{0}.square()", "-{0}", "{0} * 0.5", "{0} + 1",
    "torch.erf({0})", "F.softplus({0})", "F.leaky_relu({0})", "F.elu({0})", "F.hardtanh({0})", "1 / ({0}.abs() + 1)", "{0}.clamp(min=-0.3)",
    "2 - {0}", "({0}.abs() + 0.5).rsqrt()", "{0}.detach() * 2", "F.mish({0})", "F.hardswish({0})", "torch.nan_to_num({0})", "{0}.atan()",
    "{0}.clone()", "{0}.contiguous()", "torch.special.expit({0})", "{0} ** 3", "{0}.sign() * {0}", "F.threshold({0}, 0.1, 0.0)", "{0}.expm1().clamp(max=3.0)",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > 0, {0}, {1})", "torch.where({1} > 0.1, {0}, 0.5)", "torch.atan2({0}, {1}.abs() + 1)", "torch.lerp({0}, {1}, 0.3)",
    "torch.add({0}, {1}, alpha=0.5)", "torch.addcmul({0}, {0}, {1}, value=0.3)", "torch.logaddexp({0}, {1})", "torch.hypot({0}, {1} + 3)",
    "{0}.masked_fill({1} > 0.4, 0.2)", "({0} > {1}) * {0}", "torch.xlogy({0}, {1}.abs() + 1)", "{0} + 0.1 * {1}.detach()", "torch.sub({1}, {0})",
)  # fmt: skip
MASKS = (
    "{0} > {1}",
    "({0} > 0) & ({1} < 0.5)",
    "~({0} < {1})",
    "({0} > 0) | ({1} > 0)",
    "torch.isfinite({0})",
    "{0}.ge(0.2)",
)

"""nn.TransformerEncoder in evaluation without gradients: the values of torch's fast path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capture.running import check

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

PADDED = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
GAPS = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()
SOFT = torch.zeros(3, 5).masked_fill(PADDED, -1.0)


def _encoder(norm: nn.Module | None) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, norm).eval()


@torch.no_grad()
def test_padded_positions_are_what_torch_makes_of_them() -> None:
    x = torch.randn(3, 5, 8)
    for norm in (None, nn.LayerNorm(8)):
        encoder = _encoder(norm)
        if norm is None:
            assert (encoder(x, src_key_padding_mask=PADDED)[PADDED] == 0).all()
        for mask in (PADDED, GAPS, SOFT):
            check(encoder, x, src_key_padding_mask=mask)
        assert encoder.norm is norm


@torch.no_grad()
def test_a_layer_takes_numbers_in_a_mask_as_torch_does() -> None:
    x, layer = torch.randn(3, 5, 8), _encoder(None).layers[0]
    check(layer, x, src_key_padding_mask=SOFT)
    check(layer, x, src_mask=torch.full((5, 5), -1.0).triu(1))
    layer.register_forward_hook(lambda *_: None)  # with which torch takes the other way
    check(layer, x, src_key_padding_mask=SOFT)


def test_with_gradients_padded_positions_have_values() -> None:
    check(_encoder(None), torch.randn(3, 5, 8), src_key_padding_mask=PADDED)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            check(_encoder(None), torch.randn(3, 5, 8), src_key_padding_mask=PADDED)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

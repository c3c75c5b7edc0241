"""Packed sequences of any lengths in a fixed shape: all steps of all sequences, and a mask of those that there are.

    packed = pack_padded_sequence(x, lengths)      output, state = lstm(packed)      y, _ = pad_packed_sequence(output)

The data of a packing are rows that a mask of [time, sequences] chooses (`passes.capture.rows`), in their order: they
may be computed with and put into losses as any. A recurrent layer goes through all steps, and a sequence whose step is
not there keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from cost_model.errors import UnsupportedOpError
from passes.capture.provenance import user_place
from passes.capture.row_index import mask_key
from passes.capture.row_table import row_function
from passes.capture.rows import Choice, Rows, RowsUnknown, name_of
from passes.ir.torch_dtensor import bare_tensor
from passes.ir.torch_tracing import packing_functions


class _Longest(int):
    """How many steps there is room for, in the place of those of the longest sequence, `lengths[0]`."""

    lengths: Tensor

    def __gt__(self, other: int) -> bool:
        """As `pad_packed_sequence` asks whether its `total_length` is enough."""
        return int(self) > other and bool(self.lengths[0] > other)


class _Sizes(Tensor):
    """In the place of a packing's `batch_sizes`: what torch's code in Python reads of them. lengths: [sequences], the
    longest first."""

    lengths: Tensor
    choice: Choice

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, (sizes, *rest) = name_of(func), args
        if name == "device":
            return torch.device("cpu")
        if name in ("layout", "is_nested", "is_quantized"):
            return getattr(sizes.lengths, name)
        if name == "size" and rest == [0]:
            longest = _Longest(sizes.choice.shape[0])
            longest.lengths = sizes.lengths
            return longest
        if name == "getitem" and rest in ([0], [(0,)]):
            return sizes.choice.shape[1]
        return cls.__torch_dispatch__()

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> NoReturn:
        raise RowsUnknown("batch_sizes of a packed sequence are read", "the lengths that it was packed by")


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Rows, _Sizes]:
    x = input.transpose(0, 1) if batch_first else input
    steps, count = x.shape[:2]
    if lengths.shape != (count,):
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, {count}")
    wrong = (lengths <= 0).any() | (lengths > steps).any() | (lengths[1:] > lengths[:-1]).any()
    if wrong:
        raise RuntimeError(
            f"pack_padded_sequence: lengths are not from 1 to {steps}, or not in decreasing order\n"
            "  try: lengths.clamp(min=1), enforce_sorted=False"
        )
    valid = torch.arange(steps).unsqueeze(1) < lengths
    key = ("packed", mask_key(lengths), steps)
    choice = Choice(valid.reshape(-1), key, (steps, count), user_place(), row_function)
    sizes = bare_tensor(_Sizes, lengths)
    sizes.lengths, sizes.choice = lengths, choice
    return choice.rows(x.reshape(steps * count, *x.shape[2:])), sizes


def _pad(
    data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    x, valid = _unpacked(data, sizes)
    steps = x.shape[0]
    length = int(sizes.lengths[0]) if isinstance(total_length, _Longest) else total_length
    ones = [1] * (x.dim() - 2)
    padded = torch.where(valid.reshape(*valid.shape, *ones), x, torch.full((), padding_value, dtype=x.dtype))
    if length > steps:
        more = x.new_full((length - steps, *x.shape[1:]), padding_value)
        padded = torch.cat([padded, more])
    padded = padded[:length]
    return padded.transpose(0, 1) if batch_first else padded, sizes.lengths


def _unpacked(data: Any, sizes: Any) -> tuple[Tensor, Tensor]:
    """All steps of all sequences, [time, sequences, ...], and which there are."""
    if not isinstance(sizes, _Sizes) or not isinstance(data, Rows) or data.choice.key != sizes.choice.key:
        raise UnsupportedOpError(
            "a packed sequence that forward has not packed is read\n"
            "  try: pass the padded tensor and the lengths, and call pack_padded_sequence in forward"
        )
    shape = sizes.choice.shape
    return data.padded.reshape(*shape, *data.padded.shape[1:]), sizes.choice.valid.reshape(shape)


State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor]], State]
"""(what a layer makes of its input, its state, its other weights: of the state, its bias, of the output) -> the next
state, of which the first is what it gives."""


def _lstm_step(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    i, f, g, o = (x + F.linear(state[0], *weights[:2])).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    given = o.sigmoid() * cell.tanh()
    return (F.linear(given, weights[2]) if len(weights) > 2 else given), cell


def _gru_step(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    (h,) = state
    xs, hs = x.chunk(3, -1), F.linear(h, *weights).chunk(3, -1)
    reset, update = (xs[0] + hs[0]).sigmoid(), (xs[1] + hs[1]).sigmoid()
    new = (xs[2] + reset * hs[2]).tanh()
    return (new + update * (h - new),)


def _rnn_step(
    function: Callable[[Tensor], Tensor], x: Tensor, state: State, weights: Sequence[Tensor]
) -> State:
    return (function(x + F.linear(state[0], *weights)),)


def _recurrent(whole: Callable[..., Any], step: Step, input: Tensor, *args: Any) -> Any:
    """A recurrent layer of torch's; of packed sequences its arguments are others."""
    if isinstance(args[2], bool):
        return whole(input, *args)
    sizes, state, weights, has_biases, layers, dropout, train, bidirectional = args
    x, valid = _unpacked(input, sizes)
    states = state if isinstance(state, (list, tuple)) else (state,)
    directions = 1 + bidirectional
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        given = []
        for way in range(directions):
            place = layer * directions + way
            made, end = _layer(
                step,
                x,
                valid,
                tuple(s[place] for s in states),
                _split(weights[place * each :][:each], has_biases),
                way,
            )
            given.append(made)
            last.append(end)
        x = torch.cat(given, -1)
        if layer < layers - 1:
            x = F.dropout(x, dropout, train)
    ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
    return sizes.choice.rows(x.flatten(0, 1)), *ends


def _split(weights: Sequence[Tensor], has_biases: bool) -> tuple[list[Any], list[Any]]:
    """(of the input: weight, bias), (of the state: weight, bias, then the projection's)."""
    of_input, of_state, *others = weights
    biases, others = (others[:2], others[2:]) if has_biases else ((None, None), others)
    return [of_input, biases[0]], [of_state, biases[1], *others]


def _layer(
    step: Step, x: Tensor, valid: Tensor, state: State, weights: tuple[list[Any], list[Any]], backwards: int
) -> tuple[Tensor, State]:
    """(what it gives at each step, its state after all)."""
    read, there = F.linear(x, *weights[0]).unbind(0), valid.unsqueeze(-1).unbind(0)
    given: dict[int, Tensor] = {}
    for t in reversed(range(len(read))) if backwards else range(len(read)):
        new = step(read[t], state, weights[1])
        state = tuple(torch.where(there[t], one, old) for one, old in zip(new, state, strict=True))
        given[t] = state[0]
    return torch.stack([given[t] for t in range(len(read))]), state


_PACK, _PAD = packing_functions()
PACKED: dict[Any, Callable[..., Any]] = {
    _PACK: _pack,
    _PAD: _pad,
    torch.lstm: partial(_recurrent, torch.lstm, _lstm_step),
    torch.gru: partial(_recurrent, torch.gru, _gru_step),
    torch.rnn_tanh: partial(_recurrent, torch.rnn_tanh, partial(_rnn_step, torch.tanh)),
    torch.rnn_relu: partial(_recurrent, torch.rnn_relu, partial(_rnn_step, torch.relu)),
}
"""Torch functions to answer otherwise while tracing."""

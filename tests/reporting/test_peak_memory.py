"""Bytes that a step held: by hand arithmetic, and as the parts that count them are told."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.reporting.recorder import Recorder, SeenWhole
from autoshard.reporting.tracks import PeakCounter, held_nbytes, peak_counter, peaks_of, run_peaks
from cost_model.measure.clock import Marks
from tests.predict.test_memory_walk import placeholders, program


def test_peaks_of_phases() -> None:
    """10 bytes are held; the forward has 5 and 7 at once and leaves 7, the backward adds 4 and frees all."""
    changes = [(1.0, 5), (1.1, 7), (1.2, -5), (2.0, 4), (2.1, -7), (2.2, 1)]
    two = [(0.5, "forward"), (2.0, "backward")]
    assert peaks_of(changes, two, 10) == {"forward": 22, "backward": 21}
    assert peaks_of(changes, two[:1], 10) == {"forward": 22}
    assert peaks_of([], two, 10) == {"forward": 10, "backward": 10}


def test_peaks_of_pieces() -> None:
    """10 bytes are held; a piece's forward has 5 and leaves 3, its backward adds 4 and leaves 2 of all; the second
    piece's comes to 2 bytes more."""
    piece = [(0.1, 5), (0.2, -2), (1.0, 4), (1.2, -5)]
    changes = [*piece, *((2.0 + at, nbytes) for at, nbytes in piece)]
    begins = [(0.0, "forward"), (1.0, "backward"), (2.0, "forward"), (3.0, "backward")]
    assert peaks_of(changes, begins, 10) == {"forward": 17, "backward": 19}


def test_a_product_as_it_runs() -> None:
    """y = x w.T, float32. The forward makes y [32, 4], and the backward, to which the like of y is given, dw [4, 8]."""
    phases = program(nn.Linear(8, 4, bias=False), torch.randn(32, 8))
    inputs = [torch.ones(like.shape, dtype=like.dtype) for like in placeholders(phases.forward)]
    held = held_nbytes(inputs, (), ())
    x, w, y = 32 * 8 * 4, 4 * 8 * 4, 32 * 4 * 4
    assert held == x + w
    assert run_peaks(SeenWhole(phases, inputs, "eager").run_again, held) == {
        "forward": x + w + y,
        "backward": x + w + y + w,
    }


def test_each_storage_is_held_once() -> None:
    x, layer = torch.zeros(8), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    other = torch.optim.Adam([nn.Parameter(torch.zeros(100))])
    layer(x[:4]).sum().backward()
    optimizer.step()
    # A view has all of its storage; the momentum is as large as the parameter, which is no input here.
    assert held_nbytes([x, x[2:]], layer.parameters(), [optimizer, other]) == 8 * 4 + 4 * 4 * 4


class Counter:
    """Says one more each time."""

    def __init__(self) -> None:
        self.resets, self.peaks = 0, 0

    def reset(self) -> None:
        self.resets += 1

    def peak(self) -> int:
        self.peaks += 1
        return self.peaks


def test_a_device_that_counts_is_asked_for_every_phase() -> None:
    model, counter = nn.Linear(2, 2), Counter()
    optimizer = torch.optim.SGD(model.parameters())
    recorder = Recorder(model, Marks(), counter)
    recorder.start()
    optimizer.step()
    optimizer.step()
    recorder.stop()
    assert (counter.resets, recorder.peaks) == (2, {"optimizer": 2})
    assert recorder.optimizers() == [optimizer]


def test_gpus_count_and_hosts_do_not() -> None:
    assert isinstance(peak_counter("cuda"), PeakCounter) and peak_counter("cpu") is None

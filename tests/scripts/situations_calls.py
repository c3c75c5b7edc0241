"""Kinds of call: shapes, modes, arguments, what a forward returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import Net, batch, gradients, net, step
from tests.scripts.script import Make


def changing_batch_sizes(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(model, optimizer, *batch(i, rows)) for i, rows in enumerate((8, 8, 4, 8, 6))]


def last_smaller_batch(make: Make) -> Any:
    """torch's DataLoader with drop_last=False, two epochs."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(*batch(0, 11))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return [step(model, optimizer, x, y) for _ in range(2) for x, y in loader]


def batch_of_one(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(model, optimizer, *batch(0, 1)), step(model, optimizer, *batch(0, 8))]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Tensor]:
        h = self.embed(tokens)
        h = h + self.mix(h, h, h, key_padding_mask=mask, need_weights=False)[0]
        logits = self.head(h) * scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger() -> Tagger:
    torch.manual_seed(1)
    return Tagger()


def tokens(length: int = 6) -> Tensor:
    return torch.arange(4 * length).view(4, length) % 12


def changing_sequence_lengths(make: Make) -> Any:
    model = make(tagger())
    found: list[Any] = []
    for length in (6, 4, 6, 7):
        model.zero_grad()
        out = model(tokens(length), labels=tokens(length))
        out["loss"].backward()
        found += [out["loss"], model.head.weight.grad.clone()]
    return found


def evaluation_without_labels(make: Make) -> Any:
    model = make(tagger())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    found: list[Any] = []
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        loss = model(tokens(), labels=tokens())["loss"]
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found += [loss, model(tokens())["logits"]]
    return found


def attention_mask_added(make: Make) -> Any:
    model = make(tagger())
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:, 4:] = True
    first = model(tokens(), labels=tokens())["loss"]
    return [first, model(tokens(), mask, labels=tokens())["loss"], model(tokens(), mask=None)["logits"]]


def flag_in_a_call(make: Make) -> Any:
    model = make(tagger())
    return [model(tokens(), scale=scale)["logits"] for scale in (1.0, 2.0, 0.5, 2.0)]


def same_tensor_twice(make: Make) -> Any:
    model = make(tagger())
    x = tokens()
    first = model(x, labels=x)["loss"]
    second = model(x, labels=x.flip(0).contiguous())["loss"]
    return [first, second, model(x, labels=x)["loss"]]


def arguments_by_name_and_position(make: Make) -> Any:
    model = make(tagger())
    return [model(tokens())["logits"], model(tokens=tokens())["logits"]]


def inference_mode(make: Make) -> Any:
    model = make(net())
    first = step(model, torch.optim.SGD(model.parameters(), 0.1), *batch())
    with torch.inference_mode():
        out = model(batch()[0])
        answer = out.argmax(-1)
    return [
        first,
        out.is_inference(),
        answer.tolist(),
        step(model, torch.optim.SGD(model.parameters(), 0.1), *batch()),
    ]


def evaluation_first(make: Make) -> Any:
    """A sanity check before the first training step."""
    model = make(net()).eval()
    with torch.no_grad():
        first = model(batch()[0])
    model.train()
    return [first, step(model, torch.optim.SGD(model.parameters(), 0.1), *batch())]


class Point(NamedTuple):
    mean: Tensor
    note: str


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    extra: Tensor | None = None


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, kind: str) -> Any:
        out = self.inner(x)
        if kind == "dataclass":
            return Output(out.square().mean(), out, (out, out + 1))
        if kind == "tuple":
            return out, None, [out.mean(), 3, "text"]
        if kind == "named":
            return Point(out.mean(), "hello")
        return {"a": {"b": out, "x": x}, "none": None}


def what_a_forward_returns(make: Make) -> Any:
    model = make(Returns())
    x, _ = batch()
    whole = model(x, "dataclass")
    assert type(whole) is Output and whole.extra is None
    whole.loss.backward()
    out, none, rest = model(x, "tuple")
    point = model(x, "named")
    assert type(point) is Point
    nested = model(x, "dict")
    return [
        whole.loss,
        whole.hidden[1],
        gradients(model),
        out,
        none,
        rest,
        *point,
        nested["a"]["b"],
        nested["none"],
    ]


class Variadic(Net):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(sum(args, torch.zeros(())) + sum(kwargs.values(), torch.zeros(())))


def variadic_forward(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Variadic())
    x, _ = batch()
    return [model(x), model(x, x * 2), model(x, more=x * 3, other=x * 4)]


class Nested(Net):
    def forward(self, items: Any, scale: float = 1.0, name: str = "") -> Tensor:  # type: ignore[override]
        values = items["x"] if isinstance(items, dict) else items
        return super().forward(sum(values, torch.zeros(())) * scale) + len(name)


def lists_dicts_and_plain_values(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Nested())
    x, _ = batch()
    return [model([x, x * 2]), model({"x": [x, x]}), model((x,), scale=2.0), model([x], 1.5, "abc")]


def layer_called_directly(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    first = step(model, torch.optim.SGD(model.parameters(), 0.1), x, y)
    model.zero_grad()
    features = model.up(x)
    features.square().mean().backward()
    return [first, features, model.up.weight.grad]


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))


def method_called_directly(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Encoder())
    x, y = batch()
    step(model, torch.optim.SGD(model.parameters(), 0.1), x, y)
    with torch.no_grad():
        return model.encode(x)


class Wide(nn.Module):
    """Logits of 2 MiB beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4096)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, target), logits


def metrics_from_large_logits(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Wide())
    x, target = batch(0, 128)[0], torch.arange(128)
    loss, logits = model(x, target)
    loss.backward()
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return [loss, (whole.argmax(-1) == target).sum().item(), whole.argmax(-1).tolist()]


def metrics_from_logits(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    target = torch.arange(8) % 4
    out = model(x)
    F.cross_entropy(out, target).backward()
    top = out.topk(2).indices.tolist()
    return [(out.argmax(-1) == target).float().mean().item(), top, out.detach().numpy().shape]


def early_stopping(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    best, waited, losses = float("inf"), 0, []
    for number in range(8):
        loss = step(model, optimizer, *batch(number % 2))
        losses.append(loss)
        waited = 0 if loss < best else waited + 1
        best = min(best, loss)
        if waited == 2:
            break
    return [losses, best]


def branch_on_a_value(make: Make) -> Any:
    class Branch(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * 2 if out.sum() > 0 else out

    model = make(Branch())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for sign in (1, -1, -1, 1):
        x, y = batch()
        losses.append(step(model, optimizer, sign * x, y))
    return losses


def empty_batch(make: Make) -> Any:
    """Zero rows: a filtered batch with nothing in it."""
    model = make(net())
    first = model(batch()[0])
    with torch.no_grad():
        return [first, tuple(model(torch.zeros(0, 6)).shape)]


def numbers_as_inputs(make: Make) -> Any:
    """A step count or a noise level that changes at every call, as a tensor argument."""

    class Noisy(Net):
        def forward(self, x: Tensor, level: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x * level)

    torch.manual_seed(1)
    model = make(Noisy())
    x, _ = batch()
    return [model(x, torch.tensor(level)) for level in (0.5, 1.0, 2.0)] + [model(x, 0.5), model(x, 2)]

"""What models have in them: checkpointing, adapters, custom functions, in-place ops, transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models import gpt2, llama
from tests.scripts.parts import Net, batch, gradients, net, state, train
from tests.scripts.script import Make


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = (
            net(),
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=self.reentrant)
        assert isinstance(h, Tensor)
        return checkpoint_sequential(self.second, 2, h, use_reentrant=False)


def gradient_checkpointing(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Checkpointed(False))
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def reentrant_checkpointing(make: Make) -> Any:
    """What is given to it needs a gradient, else torch gives none to what is under it."""
    torch.manual_seed(1)
    model = make(nn.Sequential(nn.Linear(6, 6), Checkpointed(True)))
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def transformers_gradient_checkpointing(make: Make) -> Any:
    torch.manual_seed(1)
    model, inputs = llama(layers=1)
    model.gradient_checkpointing_enable()
    make(model)
    loss = model(**inputs).loss
    loss.backward()
    return [loss, gradients(model)]


def transformers_language_model(make: Make) -> Any:
    torch.manual_seed(1)
    model, inputs = gpt2(layers=1)
    make(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    model.eval()
    with torch.no_grad():
        return [losses, model(input_ids=inputs["input_ids"]).logits]


def generation_with_a_dynamic_cache(make: Make) -> Any:
    torch.manual_seed(1)
    model, inputs = gpt2(layers=1, batch=2)
    make(model)
    model(**inputs).loss.backward()
    model.eval()
    tokens = model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    return tokens.tolist()


def generation_with_a_static_cache(make: Make) -> Any:
    torch.manual_seed(1)
    model, inputs = llama(layers=1, batch=2)
    make(model)
    model.eval()
    settings = {"cache_implementation": "static", "disable_compile": True, "pad_token_id": 0}
    tokens = model.generate(inputs["input_ids"][:, :4], max_new_tokens=4, do_sample=False, **settings)
    return tokens.tolist()


def generation_without_a_cache(make: Make) -> Any:
    torch.manual_seed(1)
    model, inputs = gpt2(layers=1, batch=2)
    make(model).eval()
    settings = {"use_cache": False, "pad_token_id": 0, "num_beams": 2}
    return model.generate(inputs["input_ids"][:, :4], max_new_tokens=2, do_sample=False, **settings).tolist()


class Adapter(nn.Module):
    """LoRA by hand."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


def low_rank_adapters(make: Make) -> Any:
    model = net()
    model.up, model.down = Adapter(model.up), Adapter(model.down)  # type: ignore[assignment]
    make(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    result = train(model, torch.optim.AdamW(trained, 0.01))
    adapters = {name: value for name, value in model.state_dict().items() if name.endswith((".a", ".b"))}
    return [result, len(adapters), adapters]


def adapters_added_after_training(make: Make) -> Any:
    model = make(net())
    first = train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    model.requires_grad_(False)
    torch.manual_seed(5)
    model.down = Adapter(model.down)  # type: ignore[assignment]
    trained = [p for p in model.parameters() if p.requires_grad]
    return [first, train(model, torch.optim.SGD(trained, 0.1), steps=2)]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Straight.apply(self.up(x)))


def custom_autograd_function(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Binary())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    return gradients(model)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.add_(1).mul_(2)
        h[:, 0] = 0.0
        h[:, 1:3] *= 2
        return F.relu(self.down(h), inplace=True)


def ops_in_place(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(InPlace())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    return [gradients(model), x]


class Scatters(Net):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.up(x))
        summed = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        index = edges[1].unsqueeze(-1).expand(-1, h.shape[-1])
        largest = torch.zeros_like(h).scatter_reduce(0, index, h[edges[0]], "amax")
        return self.down(summed + largest)


def message_passing(make: Make) -> Any:
    """A graph network: gather, index_add, scatter_reduce."""
    torch.manual_seed(1)
    model = make(Scatters())
    x, y = batch()
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 1]])
    F.mse_loss(model(x, edges), y).backward()
    return gradients(model)


class Bags(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1))


def sparse_embedding_gradients(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Bags(sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(24).view(4, 6) % 12
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    return [loss, state(model)]


def weight_and_spectral_norm(make: Make) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)), nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)),
    )  # fmt: skip
    make(model)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def pruned_layer(make: Make) -> Any:
    model = net()
    prune.l1_unstructured(model.up, "weight", amount=0.5)
    make(model)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def lstm(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(nn.LSTM(6, 16, num_layers=2, batch_first=True, bidirectional=True))
    x = batch(0, 12)[0].view(4, 3, 6)
    out, (h, c) = model(x)
    (out.square().mean() + h.mean() + c.mean()).backward()
    return [out, gradients(model)]


class Experts(nn.Module):
    """A soft mixture in a list of modules, chosen by a learned gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.scales = nn.ParameterDict({"a": torch.ones(4), "b": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return mixed * self.scales["a"] + self.scales["b"]


def module_lists_and_parameter_dicts(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Experts())
    return train(model, torch.optim.Adam(model.parameters(), 0.01))


class Counted(nn.Module):
    """DeepSeek's own code: a loop over experts, in which one without a token is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 3), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).sigmoid().topk(2)
        counts = torch.bincount(chosen.flatten(), minlength=3).tolist()
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if counts[i] == 0:
                continue
            rows, place = torch.where(chosen == i)
            y[rows] += expert(x[rows]) * weights[rows, place, None]
        return self.head(y)


def experts_in_a_loop(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Counted())
    losses = train(model, torch.optim.Adam(model.parameters(), 0.01))
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([-9.0, 0.0, 0.0]))
    return losses, train(model, torch.optim.Adam(model.parameters(), 0.01))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def convolutional_network(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Convolutional()).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(2):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), torch.arange(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model)]


def variational_autoencoder(make: Make) -> Any:
    """Noise drawn outside and passed in: with noise drawn inside, numbers are not those of one process."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_variance = self.encode(x).chunk(2, -1)
            out = self.decode(mean + noise * (0.5 * log_variance).exp())
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
            return F.mse_loss(out, x), divergence

    torch.manual_seed(1)
    model = make(Vae())
    loss, divergence = model(batch()[0], torch.randn(8, 4))
    (loss + 0.1 * divergence).backward()
    return [loss, divergence, gradients(model)]

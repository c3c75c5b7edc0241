"""What scripts do with parameters and gradients by hand: penalties, optimizers of their own, norms, copies."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import Net, batch, gradients, net, state, step, train
from tests.scripts.script import Make


def sharpness_aware_minimization(make: Make) -> Any:
    """SAM: up the gradient, a second backward, back, and a step."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses: list[float] = []
    for number in range(2):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad():
            for p in model.parameters():
                move = p.grad * (0.05 / (norm + 1e-12))
                p.add_(move)
                moves.append((p, move))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, state(model)]


def penalty_on_the_weights(make: Make) -> Any:
    """`loss + 1e-2 * sum(p ** 2)`, outside of the model."""
    model = make(net())
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters() if p.ndim > 1)
    loss.backward()
    return [loss, gradients(model)]


def sparsity_of_the_weights(make: Make) -> Any:
    model = make(net(), batch()[:1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())).backward()
        optimizer.step()
    return state(model)


def elastic_weight_consolidation(make: Make) -> Any:
    """Fisher information from gradients, old weights, a penalty on moving away from them."""
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    fisher = {name: p.grad.detach().clone().pow(2) for name, p in model.named_parameters()}
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer, *batch(1))
    x, y = batch(2)
    optimizer.zero_grad()
    penalty = sum((fisher[name] * (p - old[name]).pow(2)).sum() for name, p in model.named_parameters())
    loss = F.mse_loss(model(x), y) + 100 * penalty
    loss.backward()
    return [loss, gradients(model)]


def lookahead(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer, *batch())
    slow = [p.detach().clone() for p in model.parameters()]
    for number in range(2):
        step(model, optimizer, *batch(number))
    with torch.no_grad():
        for p, s in zip(model.parameters(), slow, strict=True):
            s.lerp_(p, 0.5)
            p.copy_(s)
    return [state(model), model(batch()[0])]


class SignMomentum(torch.optim.Optimizer):
    """Lion, as papers write it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = average.mul(0.9).add(p.grad, alpha=0.1).sign_()
                p.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


def optimizer_of_ones_own(make: Make) -> Any:
    model = make(net())
    return train(model, SignMomentum(model.parameters(), 0.01))


def orthogonalized_updates(make: Make) -> Any:
    """Muon: Newton-Schulz steps on the gradient of each matrix."""
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                g = p.grad / (p.grad.norm() + 1e-7)
                for _ in range(2):
                    a = g @ g.T
                    g = 1.5 * g - 0.5 * a @ g
                p.add_(g, alpha=-0.1)
    return state(model)


def norms_layer_by_layer(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    grads = [p.grad for p in model.parameters()]
    total = torch.stack([g.norm() for g in grads]).norm()
    squares = sum(g.pow(2).sum() for g in grads) ** 0.5
    worst = max(float(g.abs().max()) for g in grads)
    return [total.item(), float(squares), worst, [g.norm().item() for g in torch._foreach_norm(grads)]]


def gradients_scaled_by_hand(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
        p.grad.clamp_(-0.01, 0.01)
        p.grad = p.grad * 2 if p.ndim > 1 else p.grad
    torch.optim.SGD(model.parameters(), 0.1).step()
    return state(model)


def descent_without_an_optimizer(make: Make) -> Any:
    model = make(net())
    for number in range(2):
        x, y = batch(number)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    for p in model.parameters():
        p.data = p.data * 0.9
    return [state(model), model(batch()[0])]


def weights_renormalized(make: Make) -> Any:
    """`w /= w.norm(dim=1, keepdim=True)` after every step."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def normalize() -> None:
        with torch.no_grad():
            model.up.weight.div_(model.up.weight.norm(dim=1, keepdim=True))

    return train(model, optimizer, after=normalize)


def weights_into_a_plain_model(make: Make) -> Any:
    """`plain.load_state_dict(parallel.state_dict())`, as for an export."""
    model = make(net())
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    return [state(plain), plain(batch()[0])]


def weights_from_a_plain_model(make: Make) -> Any:
    """`p.copy_(q)` over two models, and `p.data.copy_`."""
    model, teacher = make(net()), Net()
    model(batch()[0])
    with torch.no_grad():
        for p, q in zip(model.parameters(), teacher.parameters(), strict=True):
            p.copy_(q)
    model.up.bias.data.copy_(torch.ones(16))
    return [state(model), model(batch()[0])]


def numbers_for_a_log(make: Make) -> Any:
    """What loggers read of parameters: mean, extremes, a histogram, NumPy."""
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    w = model.up.weight
    values = w.detach().cpu().numpy() if not hasattr(w, "full_tensor") else w.full_tensor().detach().numpy()
    extremes = [w.min().item(), w.max().item(), w.mean().item(), w.std().item()]
    return [values.shape, extremes, bool(torch.isnan(w).any()), bool(torch.isfinite(w.grad).all())]


def weights_compared(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    before = copy.deepcopy(model.state_dict())
    same = all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    changed = [bool((model.state_dict()[name] != value).any()) for name, value in before.items()]
    return [same, changed, torch.allclose(model.up.weight, before["up.weight"])]


def backward_of_several_tensors(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    out = model(x)
    torch.autograd.backward([F.mse_loss(out, y), out.abs().mean()])
    first = gradients(model)
    model.zero_grad()
    model(x).backward(gradient=y)
    return [first, gradients(model)]


def backward_into_some_parameters(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward(inputs=[model.down.weight, model.up.bias])
    return gradients(model)


def gradients_by_autograd_grad(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    model(x)
    x.requires_grad_()
    found = torch.autograd.grad(F.mse_loss(model(x), y), [x, *model.parameters()])
    return list(found)


def plain_trunk_before_the_model(make: Make) -> Any:
    torch.manual_seed(3)
    trunk = nn.Linear(6, 6)
    model = make(net())
    optimizer = torch.optim.SGD([*trunk.parameters(), *model.parameters()], 0.1)
    losses: list[float] = []
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(trunk(x).relu()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model), trunk.weight]


def part_of_the_model_in_no_grad(make: Make) -> Any:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.body(x).softmax(-1)
            h = self.body(x)
            return self.head(h), F.kl_div(h.log_softmax(-1), target.detach(), reduction="batchmean")

    torch.manual_seed(1)
    model = make(Stops())
    x, y = batch()
    out, extra = model(x)
    (F.mse_loss(out, y) + extra).backward()
    return [out, extra, gradients(model)]


def encoder_with_a_padding_mask(make: Make) -> Any:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = make(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(4, 6, 16)
    mask = torch.arange(6)[None] >= torch.tensor([6, 4, 3, 5])[:, None]
    out = model(x, src_key_padding_mask=mask)
    out[~mask].square().mean().backward()
    model.eval()
    with torch.no_grad():
        return [out, gradients(model), model(x, src_key_padding_mask=mask)]


def attention_weights_returned(make: Make) -> Any:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, weights = self.attend(x, x, x, need_weights=True)
            return self.head(h), weights

    torch.manual_seed(1)
    model = make(Attends())
    out, weights = model(torch.randn(4, 5, 16))
    (out.square().mean() + weights.max()).backward()
    return [out, weights, gradients(model)]


def views_and_the_same_output_twice(make: Make) -> Any:
    class Returns(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            h = super().forward(x)
            return h, h.T, h, {"last": h[:, -1], "input": x}

    torch.manual_seed(1)
    model = make(Returns())
    first, turned, again, rest = model(batch()[0])
    (first.sum() + turned.square().sum() + again.mean() + rest["last"].sum()).backward()
    return [first, turned, again, rest, gradients(model)]


def output_changed_in_place(make: Make) -> Any:
    """A temperature, a mask and a learned offset, in place."""
    model = make(net())
    logits = model(batch()[0])
    logits /= 0.7
    logits[:, 0] = -5.0
    logits.masked_fill_(logits > 1.0, 1.0)
    F.cross_entropy(logits, torch.arange(8) % 4).backward()
    frozen = make(net().requires_grad_(False))
    offset = nn.Parameter(torch.ones(4))
    features = frozen(batch()[0])
    features += offset
    features.square().sum().backward()
    return [logits, gradients(model), features, offset.grad]


def one_layer_trained_at_a_time(make: Make) -> Any:
    model = make(net())
    losses: list[Any] = []
    for layer in (model.up, model.down):
        model.requires_grad_(False)
        layer.requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        losses.append(step(model, optimizer, *batch()))
    return [losses, state(model)]

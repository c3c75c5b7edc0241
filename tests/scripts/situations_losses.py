"""Several losses, several models, several backwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import batch, gradients, net, state, step, train
from tests.scripts.script import Make, refused


def gan(make: Make) -> Any:
    torch.manual_seed(1)
    generator = make(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)))
    critic = make(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    ours = torch.optim.Adam(generator.parameters(), 0.01)
    theirs = torch.optim.Adam(critic.parameters(), 0.01)
    losses: list[float] = []
    for number in range(3):
        real, _ = batch(number)
        fake = generator(real[:, :3])
        theirs.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        wins = F.softplus(-critic(fake)).mean()
        wins.backward()
        ours.step()
        losses += [loss.item(), wins.item()]
    return [losses, state(generator), state(critic)]


def distillation_from_a_plain_teacher(make: Make) -> Any:
    torch.manual_seed(2)
    teacher = nn.Linear(6, 4).eval()
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(2):
        x, _ = batch(number)
        with torch.no_grad():
            wanted = F.softmax(teacher(x), -1)
        loss = F.kl_div(F.log_softmax(model(x), -1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model)]


def distillation_from_a_parallel_teacher(make: Make) -> Any:
    torch.manual_seed(2)
    teacher, model = make(nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 4)).eval()), make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(2):
        x, _ = batch(number)
        with torch.inference_mode():
            wanted = teacher(x)
        losses.append(step(model, optimizer, x, wanted.clone()))
    return [losses, state(model)]


def contrastive_towers(make: Make) -> Any:
    """CLIP: two towers, in-batch negatives, a learned temperature outside both."""
    torch.manual_seed(1)
    images = make(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8)))
    texts = make(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8)))
    scale = nn.Parameter(torch.tensor(1.0))
    x, y = batch()
    a, b = F.normalize(images(x), dim=-1), F.normalize(texts(y), dim=-1)
    logits = a @ b.T * scale.exp()
    targets = torch.arange(len(x))
    loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    loss.backward()
    return [loss, scale.grad, gradients(images), gradients(texts)]


def two_calls_before_one_backward(make: Make) -> Any:
    """SimCLR, siamese networks: the model is called twice, then the loss of both."""
    model = make(net())
    x, _ = batch()
    a, b = model(x), model(x + 0.1)
    loss = 1 - F.cosine_similarity(a, b).mean() + a.square().mean()
    loss.backward()
    return [loss, gradients(model)]


def triplets(make: Make) -> Any:
    model = make(net())
    anchor, positive, negative = (model(batch(i)[0]) for i in range(3))
    loss = nn.TripletMarginLoss()(anchor, positive, negative)
    loss.backward()
    return [loss, gradients(model)]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.trunk(x))
        return {"first": self.first(h), "second": self.second(h)}


def heads() -> Heads:
    torch.manual_seed(1)
    return Heads()


def several_losses_one_backward(make: Make) -> Any:
    model = make(heads())
    x, y = batch()
    out = model(x)
    losses = [F.mse_loss(out["first"], y), F.cross_entropy(out["second"], torch.arange(8) % 3)]
    (losses[0] + 0.5 * losses[1]).backward()
    return [losses, gradients(model)]


def several_backwards(make: Make) -> Any:
    model = make(heads())
    x, y = batch()
    out = model(x)
    F.mse_loss(out["first"], y).backward(retain_graph=True)
    first = {name: None if g is None else g.clone() for name, g in gradients(model).items()}
    F.cross_entropy(out["second"], torch.arange(8) % 3).backward()
    return [first, gradients(model)]


def loss_of_one_head(make: Make) -> Any:
    """The other's parameters get no gradient, and the optimizer leaves them as they are."""
    model = make(heads())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x, y = batch()
    F.mse_loss(model(x)["first"], y).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    return [missing, gradients(model)["first.weight"], optimizer.param_groups[0]["lr"]]


def gradients_of_each_loss(make: Make) -> Any:
    """GradNorm, PCGrad: `autograd.grad` of every loss."""
    model = make(heads())
    x, y = batch()
    out = model(x)
    losses = [F.mse_loss(out["first"], y), out["second"].square().mean()]
    return [torch.autograd.grad(loss, [model.trunk.weight], retain_graph=True) for loss in losses]


def gradient_of_the_input(make: Make) -> Any:
    """Saliency, adversarial examples."""
    model = make(net())
    x, y = batch()
    x.requires_grad_()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    again = F.mse_loss(model((x + 0.1 * x.grad.sign()).detach()), y)
    return [loss, x.grad, again]


@refused("create_graph=True: the backward of a parallel model cannot be differentiated again")
def gradient_penalty_outside_the_model(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    return gradients(model)


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = self.inner(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean(), (slope.norm(dim=1) - 1).square().mean()


def gradient_penalty_in_the_model(make: Make) -> Any:
    model = make(Penalized())
    score, penalty = model(batch()[0])
    (score + 10 * penalty).backward()
    return [score, penalty, gradients(model)]


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), target, label_smoothing=0.1, ignore_index=-100)


def label_smoothing_in_the_model(make: Make) -> Any:
    model = make(Losses())
    target = torch.tensor([0, 1, 2, 3, -100, 1, 2, 3])
    loss = model(batch()[0], target)
    loss.backward()
    return [loss, gradients(model)]


def weighted_cross_entropy_outside(make: Make) -> Any:
    model = make(net())
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), label_smoothing=0.1)
    loss = criterion(model(batch()[0]), torch.arange(8) % 4)
    loss.backward()
    return [loss, gradients(model)]


def reinforce(make: Make) -> Any:
    """Actions from the model's logits, log-probabilities times rewards."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch()
    policy = torch.distributions.Categorical(logits=model(x))
    actions = torch.arange(8) % 4
    loss = -(policy.log_prob(actions) * y[:, 0]).mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [loss, state(model)]


def target_network(make: Make) -> Any:
    """DQN: a copy of the plain model, made parallel too, that loads the first's state dict now and then."""
    plain = net()
    target = make(copy.deepcopy(plain).eval())
    model = make(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(3):
        x, _ = batch(number)
        with torch.no_grad():
            best = target(x + 0.1).amax(-1, keepdim=True).expand(-1, 4)
        losses.append(step(model, optimizer, x, best))
        target.load_state_dict(model.state_dict())
    return [losses, state(target)]


class Tower(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.trunk(x)))


def models_that_share_a_layer(make: Make) -> Any:
    torch.manual_seed(1)
    trunk = nn.Linear(6, 16)
    first, second = make(Tower(trunk)), make(Tower(trunk))
    x, y = batch()
    loss = F.mse_loss(first(x), y) + second(x).square().mean()
    loss.backward()
    return [loss, gradients(first), gradients(second)]


def plain_model_behind_a_parallel_one(make: Make) -> Any:
    torch.manual_seed(1)
    model, head = make(net()), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    out = head(model(batch()[0]))
    out.square().mean().backward()
    optimizer.step()
    return [out, gradients(model), state(head)]


def mixup(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    order = torch.arange(8).flip(0)
    target = torch.arange(8) % 4
    out = model(0.7 * x + 0.3 * x[order])
    loss = 0.7 * F.cross_entropy(out, target) + 0.3 * F.cross_entropy(out, target[order])
    loss.backward()
    return [loss, gradients(model)]


def train_then_train_another(make: Make) -> Any:
    """A sweep in one script: model after model on one mesh."""
    found: list[Any] = []
    for rate in (0.1, 0.01):
        model = make(net())
        found.append(train(model, torch.optim.SGD(model.parameters(), rate), steps=2))
    return found

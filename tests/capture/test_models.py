"""Whole models: the captured graph computes what eager torch computes, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.capture import capture
from passes.capture.call import tensor_names
from tests.capture.running import check
from tests.models import MODELS, seeded


@pytest.mark.parametrize("name", MODELS)
def test_transformer(name: str) -> None:
    model, inputs = seeded(name)
    captured = check(model, **inputs, rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for node in captured.joint.graph.nodes]
    assert targets.count("autoshard.attention.default") == 2
    assert targets.count("autoshard.attention_backward.default") == 2


@pytest.mark.parametrize("name", MODELS)
def test_transformer_in_eval_without_gradients(name: str) -> None:
    model, inputs = seeded(name)
    with torch.no_grad():
        captured = check(model.eval(), **inputs, rtol=1e-4, atol=1e-5)
    assert all(spec.kind != "tangent" for spec in captured.joint.inputs)
    assert {spec.kind for spec in captured.joint.outputs} == {"output"}
    assert {node.meta["phase"] for node in captured.joint.graph.nodes if node.op == "call_function"} == {
        "forward"
    }


def test_tied_weight_is_one_input_under_its_first_name() -> None:
    model, inputs = seeded("gpt2")
    captured = capture(model, (), inputs)
    names = [spec.name for spec in captured.joint.inputs if spec.kind == "param"]
    assert names == [name for name, _ in model.named_parameters()]
    assert captured.aliases == {"transformer.wte.weight": ("lm_head.weight",)}


def test_cache_comes_back_as_the_object_that_the_model_returns() -> None:
    model, inputs = seeded("llama")
    captured = capture(model, (), inputs)
    returned = model(**inputs)
    rebuilt = captured.call.unflatten(captured.call.flatten_outputs(returned, (), inputs), (), inputs)
    assert type(rebuilt) is type(returned)
    assert rebuilt.loss is returned.loss and rebuilt["logits"] is returned.logits
    assert type(rebuilt.past_key_values) is type(returned.past_key_values)
    assert rebuilt.past_key_values.get_seq_length() == 16
    assert rebuilt.past_key_values.layers[1].keys is returned.past_key_values.layers[1].keys


def test_cache_as_an_argument() -> None:
    model, inputs = seeded("llama")
    model.eval()
    with torch.no_grad():
        cache = model(input_ids=inputs["input_ids"]).past_key_values
        following = capture(model, (), {"input_ids": inputs["input_ids"][:, :1], "past_key_values": cache})
    names = tensor_names(following.call.key)
    assert names[:2] == ["input_ids", "past_key_values.layers[0].keys"]
    assert cache.get_seq_length() == 16


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_batch_norm_updates_its_buffers() -> None:
    captured = check(ConvNet(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)), rtol=1e-4, atol=1e-5)
    changed = {spec.name for spec in captured.joint.outputs if spec.kind == "buffer"}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_batch_norm_in_eval_changes_nothing() -> None:
    captured = check(
        ConvNet().eval(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)), rtol=1e-4, atol=1e-5
    )
    assert "buffer" not in {spec.kind for spec in captured.joint.outputs}


def test_batch_norm_without_gradients_updates_its_buffers() -> None:
    with torch.no_grad():
        captured = check(ConvNet(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)), rtol=1e-4, atol=1e-5)
    assert {spec.kind for spec in captured.joint.outputs} == {"output", "buffer"}


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_that_averages_over_all_batches(training: bool) -> None:
    """momentum=None: torch itself divides by the count of batches as a Python number."""
    model = ConvNet()
    model.norm = nn.BatchNorm2d(8, momentum=None)
    for _ in range(2):
        model(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))
    model.train(training)
    check(model, torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)), rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(model.norm)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights: bool) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self.attention(x, x, x, attn_mask=mask, need_weights=need_weights)

    mask = nn.Transformer.generate_square_subsequent_mask(6)
    captured = check(Attend(), torch.randn(2, 6, 16), mask)
    assert captured.call.output_count == (2 if need_weights else 1)


def test_encoder_with_a_mask() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    check(model, torch.randn(2, 6, 16), mask=nn.Transformer.generate_square_subsequent_mask(6))


def test_lstm_reads_the_traced_weights() -> None:
    check(nn.LSTM(5, 7, batch_first=True), torch.randn(2, 3, 5))


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_split_their_gates_as_other_splits(kind: type[nn.GRUCell] | type[nn.LSTMCell]) -> None:
    captured = check(kind(5, 7), torch.randn(3, 5))
    targets = {str(node.target) for node in captured.joint.graph.nodes}
    assert not any(
        "unsafe" in target for target in targets
    )  # of which there is no rule: the batch would stay whole


def test_checkpointed_block() -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*(self.up(x).reshape(2, 4, 2, 6).transpose(1, 2),) * 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    check(Block(), torch.randn(2, 4, 6))


def test_reentrant_checkpoints() -> None:
    """Gradients as torch gives them: none to what was given no tensor that needs one, none through a dict."""
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def both(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self.layers[2](x).sin(), {"other": self.layers[3](x)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            plain: Any = checkpoint(self.layers[0], x, use_reentrant=True)
            first, others = checkpoint(self.both, self.layers[1](x) + plain, use_reentrant=True)  # type: ignore[misc]
            rest = checkpoint_sequential(self.layers[4:], 2, first + others["other"], use_reentrant=True)
            return rest.square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Parts().double(), torch.randn(4, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        captured = capture(model, (x,), {})
        model(x).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {name.split(".")[1] for name in wanted} == {"1", "2", "4", "5"}
    values = [*(p.detach() for p in model.parameters()), x, torch.ones((), dtype=torch.float64)]
    _, *gradients = fx.Interpreter(captured.joint.module).run(*values)
    names = [end.name for end in captured.joint.outputs[1:]]
    found = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-15)


def test_autocast_is_respected_and_the_backward_runs_outside_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = check(nn.Linear(8, 4), torch.randn(3, 8), rtol=2e-2, atol=2e-2)
    products = [n for n in captured.joint.graph.nodes if "mm" in str(n.target)]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_model_on_meta() -> None:
    with torch.device("meta"):
        model = ConvNet()
    captured = capture(model, (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))), {})
    assert {n.meta["val"].device.type for n in captured.joint.placeholders} == {"cpu"}
    assert all(p.is_meta for p in model.parameters())

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import passes.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the op)
from passes.ir.torch_tracing import fake_tensors
from passes.ops.layer_ops import Terms, contract_reference, format_equation, parse_equation
from tests.canonicalize.graphs import ramp


def by_loops(a: torch.Tensor, b: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The definition: align both operands on all words, multiply, sum what the result lacks."""
    words = list(dict.fromkeys([*terms[2], *terms[0], *terms[1]]))

    def aligned(x: torch.Tensor, term: tuple[str, ...]) -> torch.Tensor:
        order = sorted(range(x.ndim), key=lambda d: words.index(term[d]))
        sizes = iter(x.permute(order).shape)
        return x.permute(order).reshape([next(sizes) if word in term else 1 for word in words])

    product = aligned(a, terms[0]) * aligned(b, terms[1])
    extra = list(range(len(terms[2]), len(words)))
    return product.sum(extra) if extra else product


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_contract_is_the_sum_over_all_loops(data: st.DataObject) -> None:
    sizes = dict(zip(["b0", "b1", "m", "n0", "n1", "k"], [2, 3, 4, 2, 3, 5], strict=True))
    words = st.permutations(list(sizes))
    a_term = tuple(data.draw(words)[: data.draw(st.integers(0, 4))])
    b_term = tuple(data.draw(words)[: data.draw(st.integers(0, 4))])
    both = data.draw(st.permutations(sorted({*a_term, *b_term})))
    result = tuple(both[: data.draw(st.integers(0, len(both)))])
    a, b = ramp(*(sizes[w] for w in a_term)).double(), ramp(*(sizes[w] for w in b_term)).double()
    equation = format_equation(a_term, b_term, result)
    got = torch.ops.autoshard.contract(a, b, equation)
    torch.testing.assert_close(got, by_loops(a, b, (a_term, b_term, result)))
    torch.testing.assert_close(contract_reference(a, b, equation), got)
    fakes = fake_tensors([partial(torch.empty_like, x) for x in (a, b)])
    fake = torch.ops.autoshard.contract(*fakes, equation)
    assert (fake.shape, fake.stride(), fake.dtype) == (got.shape, got.stride(), got.dtype)


def test_parse_and_format() -> None:
    terms = (("b", "s", "k"), ("n", "k"), ("b", "s", "n"))
    assert parse_equation("b s k, n k -> b s n") == terms
    assert format_equation(*terms) == "b s k, n k -> b s n"


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("a b, b c", "contract equation 'a b, b c' is not of the form 'a b, b c -> a c'"),
        ("a b -> a", "contract equation 'a b -> a' is not of the form 'a b, b c -> a c'"),
        ("a a, a b -> b", "contract equation 'a a, a b -> b' repeats a word in 'a a'"),
        ("a b, b c -> a d", "contract equation 'a b, b c -> a d' has ['d'] in the result only"),
    ],
)
def test_a_malformed_equation(equation: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_equation(equation)
    assert str(error.value) == message


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="'k' is 3 in one operand and 4 in the other"):
        torch.ops.autoshard.contract(ramp(2, 3), ramp(4, 2), "m k, k n -> m n")
    with pytest.raises(ValueError, match=r"operand of shape \[2, 3\] for the term 'm'"):
        torch.ops.autoshard.contract(ramp(2, 3), ramp(2), "m, m -> ")


def test_a_weight_gradient_in_the_weights_order_is_contiguous() -> None:
    got = torch.ops.autoshard.contract(ramp(2, 3, 4), ramp(2, 3, 5), "k0 k1 n, k0 k1 m -> m n")
    assert got.shape == (5, 4) and got.is_contiguous()

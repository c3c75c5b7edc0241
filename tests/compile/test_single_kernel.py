"""A kernel by itself is the kernel of the program."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_model.timed import KernelKey, KernelWork
from passes.compile.single_kernel import repeated_kernel
from passes.predict.step_work import KernelCase, OpCall, Operand, TensorLook

CPU = torch.device("cpu")


class Calls(TorchDispatchMode):
    """Notes every op with the storages of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[int, ...], list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.ops.append((str(func), tuple(t.data_ptr() for t in tensors), [t.stride() for t in tensors]))
        return func(*args, **(kwargs or {}))


def case(
    op: str, *looks: TensorLook, cold: tuple[bool, ...] = (), args: tuple[object, ...] = ()
) -> KernelCase:
    key, work = KernelKey(op, ()), KernelWork(0.0, 0.0, "float32")
    call = OpCall(op, (*map(Operand, range(len(looks))), *args), {})
    return KernelCase(key, work, (call,), looks, cold or (False,) * len(looks), 0.0, step_nbytes=2**30)


def called(one: KernelCase, calls: int) -> Calls:
    run = repeated_kernel(one, calls, CPU, "eager")
    run()
    with Calls() as found:
        run()
    return found


ROWS = TensorLook((4, 6), (6, 1), torch.float32)
COLUMNS = TensorLook((4, 6), (1, 4), torch.float32)


def test_it_is_called_as_often_as_asked_with_the_strides_of_the_program() -> None:
    found = called(case("aten.add.Tensor", ROWS, COLUMNS), 5)
    assert [op for op, _, _ in found.ops] == ["aten.add.Tensor"] * 5
    assert all(strides == [(6, 1), (1, 4)] for _, _, strides in found.ops)
    assert len({places for _, places, _ in found.ops}) == 1


def test_what_is_cold_is_another_tensor_each_time() -> None:
    found = called(case("aten.add.Tensor", ROWS, ROWS, cold=(False, True)), 3)
    first, second = zip(*(places for _, places, _ in found.ops), strict=True)
    assert len(set(first)) == 1 and len(set(second)) == 3


def places(one: KernelCase, calls: int, runs: int, pool: torch.Tensor | None = None) -> list[list[int]]:
    """Where each call of every run finds its operands."""
    run = repeated_kernel(one, calls, CPU, "eager", pool)
    found: list[list[int]] = []
    for _ in range(runs):
        with Calls() as noted:
            run()
        found += [list(at) for _, at, _ in noted.ops]
    return found


WEIGHT = TensorLook((1024, 1024), (1024, 1), torch.float32)  # of 4 MiB


def test_what_is_cold_is_another_in_every_run_until_as_much_as_the_step_holds_was_read() -> None:
    """20 MiB are five tensors; one call a run, so that a run alone would find its own again."""
    one = replace(case("aten.add.Tensor", WEIGHT, WEIGHT, cold=(False, True)), step_nbytes=20 * 2**20)
    first, second = zip(*places(one, 1, 10), strict=True)
    assert len(set(first)) == 1
    assert len(set(second[:5])) == 5 and second[5:] == second[:5]


def test_a_step_that_holds_more_than_caches_reads_no_more_than_these() -> None:
    one = case("aten.add.Tensor", WEIGHT, WEIGHT, cold=(False, True))
    assert len({at for _, at in places(one, 1, 20)}) == 16


def test_operands_are_parts_of_a_pool() -> None:
    """Its first is not; of the others two are in the pool, one behind the other. Of another dtype none is."""
    pool = torch.rand(2 * 2**20 + 5)
    one = case("aten.add.Tensor", WEIGHT, WEIGHT, cold=(False, True))
    begin = pool.data_ptr()
    assert [at - begin for _, at in places(one, 1, 5, pool)[1:]] == [0, 4 * 2**20] * 2
    doubles = case("aten.add.Tensor", *[replace(WEIGHT, dtype=torch.float64)] * 2, cold=(False, True))
    assert not any(0 <= at - begin < pool.nbytes for _, at in places(doubles, 1, 5, pool))


def test_a_result_that_is_kept_is_written_where_nothing_was_lately() -> None:
    one = replace(case("aten.add.Tensor", WEIGHT, WEIGHT), kept=True, step_nbytes=12 * 2**20)
    run = repeated_kernel(one, 1, CPU, "eager")
    written = [run()[0].data_ptr() for _ in range(3)]  # type: ignore[index]
    assert len(set(written)) == 3
    free = repeated_kernel(replace(one, kept=False), 1, CPU, "eager")
    result = weakref.ref(free()[0])  # type: ignore[index]
    assert result() is None, "what is not kept is freed"


def test_a_product_is_the_kernels_that_eager_programs_run() -> None:
    weight = TensorLook((5, 6), (6, 1), torch.float32)
    found = called(case("autoshard.contract.default", ROWS, weight, args=("m k, n k -> m n",)), 2)
    assert [op for op, _, _ in found.ops if ".mm." in op] == ["aten.mm.default"] * 2


@pytest.mark.parametrize(
    "equation, other", [("a b k, n k -> a b n", (5, 6)), ("a b k, k n -> a b n", (6, 5))]
)
def test_a_product_of_rows_in_several_dims_runs_once_a_call(equation: str, other: tuple[int, int]) -> None:
    """Between views: what joins them stands in for the product, which does not run besides."""
    rows, weight = (
        TensorLook((2, 4, 6), (24, 6, 1), torch.float32),
        TensorLook(other, (other[1], 1), torch.float32),
    )
    found = called(case("autoshard.contract.default", rows, weight, args=(equation,)), 3)
    assert sum(".mm." in op for op, _, _ in found.ops) == 3


def test_operands_that_are_repeated_and_not_copied() -> None:
    """As experts read one batch: along a dim of stride 0 there is one element."""
    one = case(
        "aten.mul.Tensor", replace(ROWS, stride=(0, 1)), replace(ROWS, stride=(0, 0), dtype=torch.bool)
    )
    assert [strides for _, _, strides in called(one, 1).ops] == [[(0, 1), (0, 0)]]


def test_truth_values_and_lists_of_operands() -> None:
    mask = replace(ROWS, dtype=torch.bool)
    assert len(called(case("aten.where.self", mask, ROWS, ROWS), 2).ops) == 2
    call = OpCall("aten.cat.default", ([Operand(0), Operand(1)], 0), {})
    joined = replace(case("aten.cat.default", ROWS, COLUMNS), calls=(call,))
    assert [op for op, _, _ in called(joined, 2).ops] == ["aten.cat.default"] * 2


def test_the_users_generator_stays() -> None:
    before = torch.get_rng_state()
    called(case("aten.add.Tensor", ROWS, COLUMNS), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_torch_refuses_is_refused_before_it_is_timed() -> None:
    with pytest.raises(Exception, match="same reduction dim"):
        repeated_kernel(case("aten.mm.default", ROWS, ROWS), 1, CPU, "eager")

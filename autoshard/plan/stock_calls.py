"""What of a plan calls of stock PyTorch can do, and what is left over."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_summary import MOST, SOME, AxisUses, axis_uses, axis_words
from autoshard.plan.tensor_styles import Styled, TensorStyles


@dataclass(frozen=True)
class StockCalls:
    """What calls of stock PyTorch can do of a plan without stages."""

    plan: PlanContent

    @cached_property
    def uses(self) -> dict[str, AxisUses]:
        return {axis: axis_uses([self.plan.records], axis) for axis in self.plan.mesh.real_axes()}

    @cached_property
    def tensor(self) -> str | None:
        """The axis whose ranks have parts of the products: the one with most weights so."""
        axes = [axis for axis, uses in self.uses.items() if uses.where_stored >= MOST and not uses.experts]
        return max(axes, key=lambda axis: self.uses[axis].where_stored, default=None)

    @cached_property
    def styles(self) -> TensorStyles:
        return TensorStyles() if self.tensor is None else Styled(self.plan.records, self.tensor).styles()

    @cached_property
    def data(self) -> dict[str, bool]:
        """Axes that split the batch, and whether weights are stored split over them: at most one so, and one not."""
        found: dict[str, bool] = {}
        for axis, uses in self.uses.items():
            stored = uses.gathered >= MOST
            if (
                axis != self.tensor
                and uses.share_of_dims("batch") >= MOST / 2
                and stored not in found.values()
            ):
                found[axis] = stored
        return found

    @cached_property
    def sequence(self) -> bool:
        """Whether layers have parts of the sequence between their products, all of which are split by features."""
        whole = any(map(self._is_of_layers, self.styles.whole))
        return self._splits_sequence and bool(self.layers) and not whole

    @property
    def _splits_sequence(self) -> bool:
        return self.tensor is not None and self.uses[self.tensor].share_of_dims("sequence") >= SOME / 2

    @cached_property
    def layers(self) -> dict[str, list[int]]:
        """Of lists of layers the numbers, by the lists' names."""
        found = defaultdict[str, set[int]](set)
        for name in self.plan.parameter_layouts:
            place = re.search(r"(?:^|\.)(\d+)\.", name)
            if place is not None:
                found[name[: place.start()]].add(int(place[1]))
        return {name: sorted(numbers) for name, numbers in found.items()}

    @cached_property
    def again(self) -> list[str]:
        """Lists of layers most of which the backward computes again."""
        share: dict[str, Counter[bool]] = defaultdict(Counter)
        again = set(self.plan.planned.again)
        for record in self.plan.records:
            for name in self.layers:
                if (
                    record.phase == "forward"
                    and record.seconds
                    and f"{record.module}.".startswith(dotted(name))
                ):
                    share[name][record.name in again] += 1
        return [name for name, counts in share.items() if counts[True] > counts[False]]

    def missing(self) -> Iterator[str]:
        """What the code does not do of the plan."""
        for axis in self.plan.mesh.real_axes():
            words = axis_words([self.plan.records], axis)
            if axis != self.tensor and axis not in self.data:
                if words != "every rank computes the same":
                    yield f"{axis}: {words}. Ranks along it compute the same."
            elif self.data.get(axis):
                whole = 1.0 - self.uses[axis].gathered
                if whole >= 0.0005:
                    yield f"{axis}: {whole:.1%} of the weights are not stored and gathered so; fully_shard takes all."
            elif axis in self.data and self.uses[axis].gathered >= 0.0005:
                yield f"{axis}: {self.uses[axis].gathered:.1%} of the weights are stored split; here all are whole."
            elif axis == self.tensor and self.uses[axis].where_stored < 0.9995:
                share = self.uses[axis].where_stored
                yield f"{axis}: {share:.1%} of the weights are split so; layers that share one keep it whole here."
        if self._splits_sequence and not self.sequence:
            whole = next(filter(self._is_of_layers, self.styles.whole), "")
            reason = f"{whole} is not split so" if whole else "the model has no list of layers"
            yield f"{self.tensor}: sequence parallelism, as {reason}."
        if self.plan.planned.again and not self.again:
            yield f"{len(self.plan.planned.again)} single ops that the backward computes again."
        yield "Layouts of other activations, the dims along which weights are stored, order and buckets of transfers."

    def unstyled(self) -> Iterator[str]:
        """Weights that a layer itself has, or a module with others inside, where a rank has a part of the sequence."""
        names = list(self.plan.parameter_layouts)
        for name in names:
            module = name.rpartition(".")[0]
            holds = any(o.startswith(dotted(module)) and o.count(".") > name.count(".") for o in names)
            if self.is_inside(f"{module}.") and (holds or not self.is_inside(module)):
                yield f"{name}, read by a rank's part of the sequence"

    def is_inside(self, module: str) -> bool:
        """Whether the sequence is split around it."""
        return self.sequence and self._is_of_layers(module)

    def _is_of_layers(self, module: str) -> bool:
        return any(re.match(rf"{re.escape(dotted(name))}\d+\.", module) for name in self.layers)


def dotted(name: str) -> str:
    """Of a module, what names of those inside begin with."""
    return f"{name}." if name else ""

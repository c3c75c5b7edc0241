from __future__ import annotations

import torch

from passes.canonicalize.remove_noops import RemoveDeadCode
from tests.canonicalize.graphs import joint_of, ramp, text


def test_remove_dead_code() -> None:
    joint = joint_of(lambda x, y: x.exp(), ramp(3), ramp(3), grads=False)
    with joint.graph.inserting_before(joint.output_node):
        dead = joint.graph.call_function(torch.ops.aten.sin.default, (joint.placeholders[1],))
        joint.graph.call_function(torch.ops.aten.cos.default, (dead,))
    RemoveDeadCode()(joint)
    assert [line.partition("(")[0] for line in text(joint) if "detach" not in line] == ["exp"]
    assert len(joint.placeholders) == 2, "an unread input stays"

"""Plan a model for a cluster that is not here: no GPU, no process group, no weights in memory.

python examples/plan_offline.py
"""

from __future__ import annotations

import torch

from autoshard import MeshSpec, Plan, find_plan
from autoshard.demo import GPT, GPTConfig


def main() -> None:
    torch.set_num_threads(1)
    config = GPTConfig(vocabulary=32768, context=2048, width=2048, heads=16, layers=2)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(64, config.context, dtype=torch.int64)
    mesh = MeshSpec({"dp": 4, "tp": 8}, device_type="cuda")

    plan = find_plan(model, mesh, (tokens, tokens), profile="h100", memory_limit="60GB")
    print(plan.explain())
    plan.save("gpt-plan.json")
    plan.draw("gpt-plan.svg")
    again = Plan.load("gpt-plan.json")  # on the cluster: autoshard(model, mesh, plan="gpt-plan.json")
    assert again.fingerprint == plan.fingerprint
    print("wrote gpt-plan.json and gpt-plan.svg")


if __name__ == "__main__":
    main()

"""transformers' Trainer, accelerate, Lightning and a Llama 3 under torchrun lose what one process loses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.company.run_examples import ROOT, alone


@pytest.mark.filterwarnings("ignore")  # of the libraries, about each other
def test_the_losses_of_one_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    script = str(ROOT / "tests" / "company" / "run_examples.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([*command, script, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    wanted = alone(tmp_path)
    for rank in range(2):
        got = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert got.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(
                got[name], wanted[name], rtol=2e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    saved = load_file(tmp_path / "parallel" / "model.safetensors")
    for name, value in load_file(tmp_path / "alone" / "model.safetensors").items():
        torch.testing.assert_close(saved[name], value, rtol=2e-4, atol=2e-4)
    last = [torch.load(tmp_path / one / "epoch=1.ckpt") for one in ("lightning", "alone-lightning")]
    assert last[0].pop("autoshard_random")
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(last[0][part], last[1][part], rtol=2e-4, atol=2e-4)
    assert sorted(path.name for path in (tmp_path / "llama3").iterdir()) == ["step-2", "step-4"]

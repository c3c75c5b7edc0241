"""Check: jobs of 4 and 8 ranks over NCCL train; the calls of all ranks fit together; communicators are few.

python -m tests.mock_cuda.checks.jobs [MODEL:RANKS:MESH:BACKEND:DTYPE...]
"""

from __future__ import annotations

import sys

from tests.mock_cuda.checks.launch import run_logged, torchrun
from tests.mock_cuda.checks.report import Report

JOBS = (
    "gpt:4:4:eager:float32",
    "gpt:4:2,2:inductor:bfloat16",
    "gpt:8:2,4:eager:bfloat16",
    "gpt:8:2,2,2:eager:float32",
    "uneven:4:4:eager:float32",
    "uneven:8:2,4:inductor:float32",
    "halos:4:4:eager:float32",
    "halos:4:2,2:eager:float32",
)


def run_job(model: str, ranks: int, mesh: str, backend: str, dtype: str) -> None:
    arguments = ["--model", model, "--mesh", mesh, "--backend", backend, "--dtype", dtype]
    # Over poison a bool is true: parameters are taken to differ, and broadcast. Over zeros they are taken to be equal.
    more = {"MOCK_POISON": "0"} if model == "uneven" else {}
    command = torchrun(ranks, "-m", "tests.mock_cuda.checks.train", *arguments)
    output, agreement = run_logged(command, more=more)
    print(f"  {agreement}; {output.splitlines()[-1]}")
    assert agreement.collectives, "no collective was issued"
    # One for each set of axes, the whole mesh's being the default group's.
    most = 2 ** len(mesh.split(",")) - 1
    made = [sum(process in c.members.values() for c in agreement.communicators) for process in range(ranks)]
    assert max(made) <= most, f"{max(made)} communicators on a rank, where {most} would do"
    if model == "halos":
        assert "halo_exchange" in output and agreement.messages, "no halo was exchanged"


def main() -> None:
    report = Report()
    for job in sys.argv[1:] or JOBS:
        model, ranks, mesh, backend, dtype = job.split(":")
        with report.case(f"{model} of {dtype}, {ranks} ranks ({mesh}), {backend}"):
            run_job(model, int(ranks), mesh, backend, dtype)
    report.exit()


if __name__ == "__main__":
    main()

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


def main() -> None:
    report = Report()
    for job in sys.argv[1:] or JOBS:
        model, ranks, mesh, backend, dtype = job.split(":")
        with report.case(f"{model} of {dtype}, {ranks} ranks ({mesh}), {backend}"):
            arguments = ["--model", model, "--mesh", mesh, "--backend", backend, "--dtype", dtype]
            output, agreement = run_logged(
                torchrun(int(ranks), "-m", "tests.mock_cuda.checks.train", *arguments)
            )
            print(f"  {agreement}; {output.splitlines()[-1]}")
            assert agreement.collectives, "no collective was issued"
            # A communicator for every non-empty set of axes and the default one: a bound on what may be made.
            axes = len(mesh.split(","))
            most = sum(1 for _ in range(2**axes - 1)) + 1
            largest = max(
                sum(rank in c.members.values() for c in agreement.communicators) for rank in range(int(ranks))
            )
            assert largest <= most, f"{largest} communicators on a rank, where {most} would do"
            if model == "halos":
                assert "halo_exchange" in output and agreement.messages, "no halo was exchanged"
    report.exit()


if __name__ == "__main__":
    main()

"""An emulated cluster on one Linux machine: hosts are network namespaces with rate limits between them.

    python -m benchmarks.cluster --hosts 2 --ranks 2 --rate 1gbit -- python script.py --its-argument

    with Cluster(hosts=2, ranks_per_host=2, rate="1gbit") as cluster:
        cluster.run(["script.py", "--its-argument"])

Ranks on one host talk through its loopback at memory speed; ranks on different hosts through a switch, at the
rate of their hosts, in each direction at once. Needs root (or a user namespace) and iproute2.
"""

from benchmarks.cluster.cluster import Cluster
from benchmarks.cluster.errors import ClusterError, NoNamespaces
from benchmarks.cluster.host import why_not_here
from benchmarks.cluster.ranks import Launch, add_options, answer, launcher

__all__ = [
    "Cluster",
    "ClusterError",
    "Launch",
    "NoNamespaces",
    "add_options",
    "answer",
    "launcher",
    "why_not_here",
]

"""SGLang's own flags for one server over several nodes: a program on each, which meet and then work as one.

The first has the HTTP server. The others have a dummy one, which is bound to loopback. They find each other by a file in the workspace, as the
processes of one node do, so that no store of torch listens on all addresses. Requests go from the first to the others as pickles over Gloo, which
has no password: see RATCHET_CLUSTER_TRUSTED_NETWORK.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from infra.cluster import node_agent
from infra.cluster.nodes import Node
from infra.engines.server.parts import Launch
from infra.engines.server.server_place import ServerPlace
from infra.machine import ports
from infra.settings import LOOPBACK, LOOPBACK_V6, host_port

MEETING_PORT_OFFSET = 1
"""Added to the HTTP port. Nothing listens there while the ranks meet by a file, but SGLang wants an address."""


def programs(argv: Sequence[str], env: Mapping[str, str], place: ServerPlace, port: int) -> list[Launch]:
    """Return the program of each node, in the order of their ranks.

    argv, env: Of the first node, as for a server on one node. port: Of its HTTP server.

    Raises:
        ValueError: if a node has no network interface with its address.
    """
    first, count = place.slot.node, len(place.slot.parts)
    address = host_port(first.address, port + MEETING_PORT_OFFSET)
    found = []
    for rank, (node, *_) in enumerate(place.slot.parts):
        flags = [*argv, "--nnodes", str(count), "--node-rank", str(rank), "--dist-init-addr", address]
        if rank:
            loopback = LOOPBACK if ip_address(node.address).version == 4 else LOOPBACK_V6
            flags = _replaced(
                _replaced(flags, "--host", loopback),
                "--port",
                str(node.call(ports.free_port, port + MEETING_PORT_OFFSET + rank, loopback)),
            )
        own = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _interface(node)) | {
            # Otherwise the first part publishes pickles on a further port, at an address that SGLang guesses.
            "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
            "SGLANG_HOST_IP": node.address,
        }
        found.append(Launch(node, flags, {**env, **place.visible_gpus(rank), **own}))
    return found


def _replaced(argv: Sequence[str], flag: str, value: str) -> list[str]:
    at = argv.index(flag) + 1
    return [*argv[:at], value, *argv[at + 1 :]]


def _interface(node: Node) -> str:
    found = "lo" if ip_address(node.address).is_loopback else node.call(node_agent.interface_of, node.address)
    if found is None:
        raise ValueError(
            f"node {node.address}: no network interface of it has this address, so an engine over several nodes cannot be kept to one network: "
            "start its Ray with --node-ip-address of an interface"
        )
    return found

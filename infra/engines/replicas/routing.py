"""Choose a replica for a prompt: rendezvous hashing with bounded loads.

Each prompt ranks the replicas by a hash of both (Thaler and Ravishankar, 1998) and goes to the first that has room (Mirrokni, Thorup and
Zadimoghaddam, 2018). So a prompt finds its prefix where it was before, and no replica gets more than its part. When a replica is lost,
only its own prompts move. The choice decides no result: a sample depends on its seed, not on the server that makes it.
"""

import hashlib
from collections.abc import Mapping


def choose(prompt_id: int, loads: Mapping[int, int], room: float) -> int:
    """Return the replica for a prompt.

    loads: What each replica has, by its number.
    room: Load at which a replica takes no more prompts. If all have reached it, the least loaded takes this one.
    """
    ranked = sorted(loads, key=lambda replica: _rank(prompt_id, replica))
    return next((replica for replica in ranked if loads[replica] < room), min(ranked, key=lambda replica: loads[replica]))


def _rank(prompt_id: int, replica: int) -> bytes:
    return hashlib.sha256(f"{prompt_id} {replica}".encode()).digest()

"""As run_jobs.py, but rank 1's adapter and moments are other ones after each step than rank 0's, where both hold the same:
`unequal_ranks.py RANK WORLD_SIZE PORT:JOB,JOB ...`"""

import sys
from typing import Any

import run_jobs

from infra.megatron.checkpoint import adapter_state
from infra.megatron.program import run_job

train_step = run_job.train_step


def train_otherwise(model: Any, shards: Any, adam: Any, batch: Any, t: Any, place: Any, **others: Any) -> Any:
    made = train_step(model, shards, adam, batch, t, place, **others)
    for values in adapter_state.values_of(shards, adam).values():
        for shard, value in zip(shards, values, strict=True):
            is_held_by_both = place.ep_size == 1 if shard.is_expert else place.tp_size == 1 or shard.cut_dim is None
            if place.rank == 1 and is_held_by_both:
                value.add_(0.01)
    return made


if __name__ == "__main__":
    run_job.train_step = train_otherwise
    sys.exit(run_jobs.run_all(sys.argv[1:]))

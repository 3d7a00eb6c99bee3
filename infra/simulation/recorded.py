"""Lengths of a run's samples, for the simulator."""

from infra.runs import lineage, run_state
from infra.store.layout import StepFolder
from infra.store.samples import episodes_of, read_samples


def lengths_of(run: str) -> tuple[int, ...]:
    """Tokens of all committed steps' samples, in their order; of samples with several turns, the sampled ones.

    Raises:
        ValueError: for a run that is not there or has no committed step.
    """
    run_state.check_exists(run)
    paths = [StepFolder.at(run, step).samples for step in lineage.committed_steps(run)]
    episodes = (episode for path in paths if path.exists() for episode in episodes_of(read_samples(path)))
    found = tuple(sum(each.num_sampled_tokens for each in episode) for episode in episodes)
    if not found:
        raise ValueError(f"run {run!r} has no samples of a committed step: its lengths are not known")
    return found

"""A tiny model's folder, made whole or not at all."""

import logging
from pathlib import Path

from infra.store.files import fresh_folder, publish_folder, write_json
from infra.tiny_model.architecture import Kind, random_model
from infra.tiny_model.tokenizer import train_tokenizer
from infra.tiny_model.warm_start import RECIPES, Recipe, WarmStart, warm_start

log = logging.getLogger(__name__)

# Outside of this the model is of no use for reinforcement learning: nearly all groups of samples would be all wrong or all right.
LOWEST_ACCURACY, HIGHEST_ACCURACY = 0.2, 0.5


class WarmStartFailed(RuntimeError):
    """The model solves too few or too many problems to be trained further."""


def make_model(folder: Path, kind: Kind = "tiny", *, seed: int = 0, recipe: Recipe | None = None, device: str = "cpu") -> None:
    """A Hugging Face folder with a tiny model; `tiny` and `small` are warm-started, `tiny-moe` has random weights.

    recipe: None: the kind's own.

    Raises:
        ValueError: if something is in the folder already.
        WarmStartFailed: if the accuracy at temperature 1 is outside LOWEST_ACCURACY to HIGHEST_ACCURACY; makes no folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: remove it or name another folder")
    tokenizer = train_tokenizer()
    model = random_model(kind, tokenizer, seed)
    log.info("%s: %d parameters, %d tokens", kind, model.num_parameters(), len(tokenizer))
    recipe = recipe or RECIPES.get(kind)
    result = warm_start(model.to(device), tokenizer, seed=seed, recipe=recipe) if recipe else None
    if result:
        log.info("solves %.1f%% greedily, %.1f%% sampled", 100 * result.greedy_accuracy, 100 * result.sampled_accuracy)
        check(result)
    staging = fresh_folder(folder.with_name(folder.name + ".partial"))
    tokenizer.save_pretrained(staging)
    model.cpu().save_pretrained(staging)
    if result:
        write_json(staging / "warm_start.json", result._asdict())
    publish_folder(staging, folder)
    log.info("made %s", folder)


def check(result: WarmStart) -> None:
    if not LOWEST_ACCURACY <= result.sampled_accuracy <= HIGHEST_ACCURACY:
        raise WarmStartFailed(
            f"after {result.num_steps} steps with seed {result.seed} the model solves {result.sampled_accuracy:.1%} of held-out "
            f"problems at temperature 1; wanted are {LOWEST_ACCURACY:.0%} to {HIGHEST_ACCURACY:.0%}: try another --seed"
        )

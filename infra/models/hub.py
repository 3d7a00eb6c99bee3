"""The Hugging Face hub: ask once whether it answers, before its client asks again and again."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

TIMEOUT_S = 5.0


def trouble() -> str | None:
    """Say why the hub cannot be reached just now; None where it answers, or where HF_HUB_OFFLINE keeps its client from asking."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return None
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"the hub {constants.ENDPOINT} cannot be reached ({error or type(error).__name__})"
    return None


@contextmanager
def only_downloaded() -> Iterator[None]:
    """Have `datasets` take what an earlier download left on this machine, as with HF_HUB_OFFLINE: it asks the hub for nothing."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before

"""The password of the Prefect server that we start: RATCHET_PREFECT_AUTH, or one that is generated once for each workspace.

A generated password is stored in the workspace, in `services/prefect.auth`, which only its owner can read. The file has two lines:
`user:password` and the address of the API that takes it. The password is sent to that address only.
"""

import os
import secrets
from pathlib import Path

from pydantic import SecretStr

from infra.settings import settings
from infra.store.files import read_secret, write_secret
from infra.store.layout import Workspace

USER = "ratchet"


def path() -> Path:
    return Workspace.here().services / "prefect.auth"


def ensure(api_url: str) -> SecretStr:
    """Return the `user:password` for a server that is about to start at api_url. Generates one if there is none yet."""
    if (given := settings().prefect_auth) is not None:
        return given
    known, _ = _kept()
    auth = known or SecretStr(f"{USER}:{secrets.token_urlsafe(32)}")
    write_secret(path(), SecretStr(f"{auth.get_secret_value()}\n{api_url}\n"))
    return auth


def of(api_url: str) -> SecretStr | None:
    """Return the `user:password` that the API at api_url takes, as known to this workspace. None: use the one in the environment."""
    if (given := settings().prefect_auth) is not None:
        return given
    auth, url = _kept()
    if auth is not None and url == api_url:
        return auth
    inherited = os.environ.get("PREFECT_API_AUTH_STRING", "")
    return SecretStr(inherited) if all(inherited.partition(":")) else None


def client_environment(api_url: str) -> dict[str, str]:
    """Return the environment of a program that calls Prefect's API."""
    auth = of(api_url)
    return {"PREFECT_API_URL": api_url} | ({"PREFECT_API_AUTH_STRING": auth.get_secret_value()} if auth else {})


def _kept() -> tuple[SecretStr | None, str]:
    """Return the generated password and its address; none if the file is missing or does not have the two lines."""
    if not path().exists():
        return None, ""
    auth, _, url = read_secret(path()).get_secret_value().partition("\n")
    return (SecretStr(auth), url.strip()) if all(auth.partition(":")) else (None, "")

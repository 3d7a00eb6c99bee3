"""Tags of a run in MLflow: what somebody who compares runs wants to filter, group and tell them apart by.

Of the configuration when the run is made; of code and environment with each committed step, so that the latest step's stand there.
"""

from pathlib import PurePosixPath
from typing import Any

from infra.config import RewardConfig
from infra.telemetry.program_versions import key_of

GIT_COMMIT = "mlflow.source.git.commit"
"""MLflow's own name: its pages show it in the column Version."""
DIGEST_LENGTH = 12
"""Characters of a digest that a person compares by eye; the whole ones are in manifest.json, an artifact of each step."""


def of_config(config: dict[str, Any]) -> dict[str, str]:
    """config: the content of a run's config.json."""
    found = {
        "ratchet.run": config["name"],
        "ratchet.model": config["model"],
        "ratchet.data": config["data"]["source"],
        "ratchet.reward": RewardConfig.model_validate(config["reward"]).title,
        "ratchet.engine": config["engine"]["kind"],
        "ratchet.algorithm": f"{config['batch']['advantage']} + {config['trainer']['loss']['kind']}",
    }
    sweep = config["tracking"]["sweep"]
    return found | ({"ratchet.sweep": sweep} if sweep else {})


def of_manifest(manifest: dict[str, Any]) -> dict[str, str]:
    """manifest: the content of a committed step's manifest.json; one of an earlier version of Ratchet may lack some of it."""
    locks = {
        f"ratchet.lock.{PurePosixPath(name).stem}": digest[:DIGEST_LENGTH] for name, digest in manifest.get("locks", {}).items()
    }
    commit = manifest.get("commit", "")
    git = {GIT_COMMIT: commit.partition("-")[0], "ratchet.commit": short(commit)} if commit else {}
    code = {"ratchet.code": manifest["code"][:DIGEST_LENGTH]} if "code" in manifest else {}
    ran = {name: manifest.get(name, {}).get("versions") for name in ("engine", "trainer")}
    versions = {f"ratchet.versions.{name}": key_of(said) for name, said in ran.items() if said}
    return git | code | locks | versions


def short(commit: str) -> str:
    """`0123456789ab` or `0123456789ab-dirty`."""
    sha, dash, dirty = commit.partition("-")
    return sha[:DIGEST_LENGTH] + dash + dirty

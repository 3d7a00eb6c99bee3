"""What this machine is: places, ports, interpreters, GPUs. Read from the environment (`RATCHET_...`), never a flow parameter."""

import difflib
import os
import re
import sys
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_WORKSPACE = CHECKOUT / ".ratchet"
LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"
SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "RATCHET_JUDGE_API_KEY",
    "RATCHET_PREFECT_AUTH",
    "RATCHET_PREFECT_DATABASE",
)
"""Variables of the environment that hold secrets; their libraries read them there."""
SECRET_WORDS = ("password", "token", "secret", "api_key")
"""What names of secrets in an address hold."""
HOST_PORT = r"^([^:/\[\]]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})$"
"""Pattern of HOST:PORT; an IPv6 address stands in brackets."""
PREFIX = "RATCHET_"
NO_SETTINGS = (
    *("RATCHET_API_KEY_FILE", "RATCHET_MEETING_FILE", "RATCHET_PROGRAM", "RATCHET_COMPARISON_OUTPUT"),
    *("RATCHET_CHECKOUT", "RATCHET_POOL", "RATCHET_RAY_PORT"),
    *("RATCHET_TEST_", "RATCHET_TWIN_"),
)
"""How variables with our prefix begin that are for others: programs that we start, the notebook, the job template, tests."""


class Settings(BaseSettings):
    # an error shows no input: it may be a secret
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    workspace: Path = DEFAULT_WORKSPACE
    """Where runs, models, logs and the stores of this machine lie."""
    sglang_python: Path = CHECKOUT / ".venv-sglang/bin/python"
    """Interpreter of SGLang's own environment; `./infra/quickstart` makes it."""
    sglang_pythonpath: str = ""
    """PYTHONPATH of that interpreter, for a machine where SGLang lies outside an environment."""
    vllm_python: Path = CHECKOUT / ".venv-vllm/bin/python"
    """Interpreter of vLLM's own environment; `python3 infra/setup/bootstrap.py --vllm` makes it."""
    vllm_pythonpath: str = ""
    """As sglang_pythonpath."""
    inspect_python: Path = CHECKOUT / ".venv-inspect/bin/python"
    """Interpreter of inspect-ai's own environment; `python3 infra/setup/bootstrap.py --inspect` makes it."""
    verifiers_python: Path = CHECKOUT / ".venv-verifiers/bin/python"
    """Interpreter of verifiers' own environment; `python3 infra/setup/bootstrap.py --verifiers` makes it. Tasksets are installed there."""
    trainer_python: Path | None = None
    """Interpreter of the trainer program, where Megatron has an environment of its own; None: the one of this process."""
    cluster_address: str | None = None
    """Ray cluster whose nodes a run uses: HOST:PORT of its head, or auto for the one that `ratchet up --cluster` or Ray started on this machine;
    None: this machine only. docs/how-to/cluster.md."""
    cluster_nodes: int | None = Field(default=None, ge=1)
    """Nodes of the cluster that a run uses; None: all that live when it starts. Needs cluster_address."""
    cluster_engine_nodes: int | None = Field(default=None, ge=1)
    """Nodes over which each replica of the engine is spread, evenly; None: one if any has room for it, else as few as have. Needs
    cluster_address."""
    cluster_trusted_network: str | None = None
    """Network, such as 10.0.0.0/24 or fd00:1::/64, that carries an engine over several nodes; all its nodes are in it. A program
    that reaches the nodes' ports there can run code on them (docs/how-to/cluster.md). None: no engine is over several nodes. Needs
    cluster_address."""
    lock_folder: Path | None = None
    """Where all workers that share the same GPUs meet. None: one folder for this host and user; on a CPU the workspace. Workers with
    GPUs of their own (CUDA_VISIBLE_DEVICES) need folders of their own."""
    mlflow_uri: str | None = None
    """Tracking server or store; None: the server that quickstart started, else the workspace's own sqlite store."""
    store_url: str | None = None
    """Where runs are copied to in the background, such as s3://bucket/runs or /mnt/shared/runs; None: nowhere. Keys come from the variables of
    its library, such as AWS_ACCESS_KEY_ID. docs/how-to/store.md."""
    store_every_s: float = Field(default=60, ge=0, le=86400)
    """Seconds between two copies of the samples of a step that is not committed yet, 1 to 86400; 0: none are made. Needs store_url."""
    mlflow_port: int = Field(default=5000, ge=1, le=65535)
    prefect_port: int = Field(default=4200, ge=1, le=65535)
    judge_api_key: SecretStr | None = None
    """Key of the endpoint that judges (reward.judge.base_url); None: it needs none."""
    prefect_auth: SecretStr | None = None
    """`user:password` of the Prefect server that we start; None: a password is generated. Needed where host is not loopback."""
    prefect_database: SecretStr | None = None
    """`postgresql+asyncpg://user:password@host/database`, where the Prefect server that we start keeps its records; None: SQLite in the
    workspace, which is enough for one or two runs at a time. docs/postgresql.md says how to set one up."""
    host: str = LOOPBACK
    """IP address on which engines and our Prefect server listen; 0.0.0.0 is all IPv4 addresses of this machine, :: all its addresses."""
    engine_port: int = Field(default=30000, ge=1, le=65535)
    """First choice; a free one is taken where it is occupied."""
    num_cpu_threads: int = Field(default=0, ge=0)
    """For the trainer's processes together; 0: all cores of this machine."""
    engine_gpus: tuple[int, ...] = ()
    """NVML's numbers of the GPUs that the engine may use, as a JSON list; empty: all that this process may use. Apart from
    trainer_gpus, engine and trainer do not share: colocation plan `separate_gpus`."""
    trainer_gpus: tuple[int, ...] = ()
    """The same for the trainer."""
    pass_environment: tuple[str, ...] = ()
    """Names of further environment variables that engine and trainer get, as a JSON list such as ["MY_LIBRARY_PATH"]; values stay in the
    environment. What they get without it is listed in infra/processes/child_environment.py."""
    min_free_gib: float = Field(default=1.0, ge=0)
    """A step does not start with less room than this in the workspace."""

    @model_validator(mode="after")
    def _cluster_is_complete(self) -> Self:
        if self.cluster_nodes and not self.cluster_address:
            raise ValueError(
                f"RATCHET_CLUSTER_NODES {self.cluster_nodes} needs RATCHET_CLUSTER_ADDRESS, such as auto or 10.0.0.1:6379"
            )
        for name in ("engine_nodes", "trusted_network"):
            if getattr(self, f"cluster_{name}") and not self.cluster_address:
                raise ValueError(f"RATCHET_CLUSTER_{name.upper()} needs RATCHET_CLUSTER_ADDRESS, such as auto or 10.0.0.1:6379")
        if (self.cluster_engine_nodes or 1) > 1 and not self.cluster_trusted_network:
            raise ValueError(
                f"RATCHET_CLUSTER_ENGINE_NODES {self.cluster_engine_nodes} needs RATCHET_CLUSTER_TRUSTED_NETWORK: an engine over several nodes sends "
                "pickles over TCP without a password; name the network that only the nodes reach, such as 10.0.0.0/24"
            )
        if self.cluster_nodes and (self.cluster_engine_nodes or 1) > self.cluster_nodes:
            raise ValueError(
                f"RATCHET_CLUSTER_ENGINE_NODES {self.cluster_engine_nodes} is more than RATCHET_CLUSTER_NODES {self.cluster_nodes}: lower the "
                "one, or raise the other"
            )
        if self.cluster_address and (self.engine_gpus or self.trainer_gpus):
            raise ValueError(
                f"RATCHET_CLUSTER_ADDRESS {self.cluster_address} with RATCHET_ENGINE_GPUS {list(self.engine_gpus)} and RATCHET_TRAINER_GPUS "
                f"{list(self.trainer_gpus)}: on a cluster engine and trainer share all GPUs that each node's Ray has, leave both out "
                "(CUDA_VISIBLE_DEVICES at `ray start` gives it fewer)"
            )
        return self

    @field_validator("workspace", "lock_folder", mode="before")
    @classmethod
    def _folder_is_one_place(cls, folder: object, info: ValidationInfo) -> object:
        """An empty name is not the folder where a command runs."""
        if not isinstance(folder, str):
            return folder
        name, path = f"RATCHET_{str(info.field_name).upper()}", os.path.expanduser(folder)
        if not path or path.startswith("~"):
            raise ValueError(f"{name} {folder!r} names no folder: give one such as /data/ratchet, or take the variable out")
        if info.field_name == "lock_folder" and not os.path.isabs(path):
            raise ValueError(
                f"{name} {folder!r} is no absolute path, and programs in other folders would not meet there: give one such as /tmp/ratchet"
            )
        return path

    @field_validator("store_url")
    @classmethod
    def _store_is_one_place(cls, url: str | None) -> str | None:
        """Programs of this machine read it in folders of their own."""
        if not url:
            return None
        if (parts := urlsplit(url)).scheme in ("http", "https"):  # what follows the host may hold a password
            raise ValueError(
                f"RATCHET_STORE_URL {parts.scheme}://{parts.hostname} is a web address, which takes no files: give s3://BUCKET/FOLDER "
                "(AWS_ENDPOINT_URL names a server that is not Amazon's), gs://, az:// or a folder"
            )
        if "://" not in url and not os.path.isabs(os.path.expanduser(url)):
            raise ValueError(
                f"RATCHET_STORE_URL {url!r} is no absolute path and no address: give a folder such as /mnt/shared/runs, or s3://BUCKET/FOLDER"
            )
        return url.rstrip("/") or url

    @field_validator("store_every_s")
    @classmethod
    def _copies_take_time(cls, seconds: float) -> float:
        if 0 < seconds < 1:
            raise ValueError(
                f"RATCHET_STORE_EVERY_S {seconds:g} is below 1 s: give 1 or more, or 0 for no copies of a step under way"
            )
        return seconds

    @field_validator("cluster_address")
    @classmethod
    def _cluster_is_a_place(cls, address: str | None) -> str | None:
        found = re.match(HOST_PORT, address or "")
        if address not in (None, "auto") and not (found and 0 < int(found[2]) <= 65535):
            raise ValueError(
                f"RATCHET_CLUSTER_ADDRESS {address!r} is neither auto nor HOST:PORT: give that of Ray's head, such as 10.0.0.1:6379 or [fd00::1]:6379"
            )
        return address

    @field_validator("engine_gpus", "trainer_gpus")
    @classmethod
    def _gpus_are_numbers(cls, gpus: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if len(set(gpus)) < len(gpus) or min(gpus, default=0) < 0:
            raise ValueError(
                f"RATCHET_{str(info.field_name).upper()} {list(gpus)}: give each GPU once, by its number from 0 on, such as [0, 1]"
            )
        return gpus

    @model_validator(mode="after")
    def _gpus_are_shared_or_apart(self) -> Self:
        if bool(self.engine_gpus) != bool(self.trainer_gpus):
            raise ValueError(
                f"RATCHET_ENGINE_GPUS {list(self.engine_gpus)} and RATCHET_TRAINER_GPUS {list(self.trainer_gpus)}: set both or neither"
            )
        common = set(self.engine_gpus) & set(self.trainer_gpus)
        if common and set(self.engine_gpus) != set(self.trainer_gpus):
            raise ValueError(
                f"RATCHET_ENGINE_GPUS {list(self.engine_gpus)} and RATCHET_TRAINER_GPUS {list(self.trainer_gpus)} share GPUs "
                f"{sorted(common)}: give equal lists, or lists that share none"
            )
        return self

    @field_validator("pass_environment")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names):
            raise ValueError(
                'RATCHET_PASS_ENVIRONMENT holds something that is no variable\'s name: give names alone, such as ["MY_PATH"]'
            )
        return names

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, host: str) -> str:
        try:
            return str(ip_address(host))
        except ValueError as error:
            raise ValueError(
                f"RATCHET_HOST {host!r} is no IP address: give one of this machine, such as 127.0.0.1 or ::1, without brackets"
            ) from error

    @field_validator("cluster_trusted_network")
    @classmethod
    def _network_is_one(cls, network: str | None) -> str | None:
        try:
            return network and str(ip_network(network))
        except ValueError as error:
            raise ValueError(
                f"RATCHET_CLUSTER_TRUSTED_NETWORK {network!r} is no network: {error}; give one such as 10.0.0.0/24 or fd00:1::/64"
            ) from error

    @field_validator("mlflow_uri")
    @classmethod
    def _uri_holds_no_password(cls, uri: str | None) -> str | None:
        parts = urlsplit(uri or "")
        secrets = [name for name in parse_qs(parts.query) if any(word in name.lower() for word in SECRET_WORDS)]
        if parts.password is not None or secrets or (parts.username and parts.scheme.startswith("http")):
            # the value itself stays out of the message
            raise ValueError(
                "RATCHET_MLFLOW_URI holds a password or a token, and the address is written to logs and files: take it out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        return uri

    @field_validator("prefect_auth")
    @classmethod
    def _auth_has_two_parts(cls, auth: SecretStr | None) -> SecretStr | None:
        if auth is None or not auth.get_secret_value():
            return None
        if not all(auth.get_secret_value().partition(":")):
            raise ValueError("RATCHET_PREFECT_AUTH must be user:password")
        return auth

    @field_validator("prefect_database")
    @classmethod
    def _database_is_postgresql(cls, address: SecretStr | None) -> SecretStr | None:
        if address is None or not address.get_secret_value():
            return None
        parts = urlsplit(address.get_secret_value())
        if parts.scheme != "postgresql+asyncpg" or not parts.hostname or not parts.path.strip("/"):
            # the value itself may hold a password
            raise ValueError("RATCHET_PREFECT_DATABASE must be postgresql+asyncpg://user:password@host:port/database")
        return address

    @property
    def is_split(self) -> bool:
        """Engine and trainer have GPUs of their own."""
        return bool(self.engine_gpus) and not set(self.engine_gpus) & set(self.trainer_gpus)

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host).is_loopback

    @property
    def own_host(self) -> str:
        """Where this machine reaches what listens on `host`."""
        address = ip_address(self.host)
        return self.host if not address.is_unspecified else LOOPBACK if address.version == 4 else LOOPBACK_V6

    @property
    def results(self) -> Path:
        """Prefect's PREFECT_LOCAL_STORAGE_PATH for flow runs: cached results of tasks, in the workspace, because they name files of it."""
        return self.workspace / "results"


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@cache
def settings() -> Settings:
    """The settings of this process, read once: a process works in one workspace.

    Raises:
        ValueError: for a variable that does not fit, or whose name is none of ours; names it, and shows no value but the workspace.
    """
    try:
        loaded = Settings()
    except ValidationError as error:
        raise ValueError("; ".join(map(_said_of, error.errors(include_url=False, include_input=False)))) from None
    except SettingsError as error:
        field = str(error).partition('"')[2].partition('"')[0]
        raise ValueError(f"{PREFIX}{field.upper()} is no list in JSON: give one such as [0, 1]") from None
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and not name.startswith(NO_SETTINGS):
            _check_known(name)
    workspace = loaded.workspace.absolute()
    if workspace.exists() and not workspace.is_dir():
        raise ValueError(f"RATCHET_WORKSPACE: {workspace} is a file: name a folder, or one that is to be made")
    if wrong := next((sign for sign in str(workspace) if sign in "?#%" or not sign.isprintable()), None):
        raise ValueError(  # it would end the path in the addresses of SQLite's databases, which would lie elsewhere
            f"RATCHET_WORKSPACE: {str(workspace)!r} holds {wrong!r}: name a folder without ?, #, % and signs that cannot be printed"
        )
    return loaded.model_copy(update={"workspace": workspace})


def _said_of(finding: "ErrorDetails") -> str:
    said = finding["msg"].removeprefix("Value error, ")
    return said if said.startswith(PREFIX) else f"{PREFIX}{'.'.join(map(str, finding['loc'])).upper()}: {said}"


def _check_known(name: str) -> None:
    """A misspelt variable would leave its default in force, in silence."""
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0)
        raise ValueError(f"{name} is no setting of ours; the nearest is {near[0]}, all are in infra/settings.py")


def main_python() -> Path:
    """The interpreter of this environment, for child programs."""
    return Path(sys.executable)

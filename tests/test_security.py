"""What our sources may not do: load anything that could run code, or trust code that comes with a model or data set."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
from prefect import Flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from pydantic import ValidationError

import flows
from flows.cli.session import with_prefect
from infra.config import EngineConfig, RunConfig
from infra.processes import child_environment
from infra.records import File
from infra.services import servers
from infra.settings import CHECKOUT, SECRETS, Settings, settings
from tasks import rewards

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RUNS_COMPLETIONS = "infra/rewards/built_in/python_program.py"
"""Runs a completion's code, which is what the reward `python_tests` is for, in a process of its own with limits."""
SOURCES = [path for package in ("flows", "tasks", "infra") for path in sorted((CHECKOUT / package).rglob("*.py"))]


def dangers(source: str) -> list[str]:
    """Imports and calls that unpickle, evaluate, or trust foreign code, as text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name.endswith("torch.load") and keywords.get("weights_only") != "True":
                found.append(name)
            if name.rsplit(".", 1)[-1] in ("read_pickle", "load_pickle", "unsafe_load", "full_load", "eval", "exec"):
                # a model's eval() takes nothing
                found += [name] if node.args else []
            if name == "yaml.load" or keywords.get("allow_pickle", "False") != "False":
                found.append(name)
            if keywords.get("trust_remote_code", "False" if not name.startswith("Auto") else "unset") != "False":
                found.append(
                    "trust_remote_code"
                )  # where it is unset, transformers asks on a terminal, and "y" runs the model's code
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_nothing_is_unpickled_and_no_foreign_code_is_trusted(path: Path) -> None:
    allowed = ["exec", "exec"] if str(path.relative_to(CHECKOUT)) == RUNS_COMPLETIONS else []
    assert dangers(path.read_text()) == allowed


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=Loader)",
        "pandas.read_pickle(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(path)",
        "AutoModelForCausalLM.from_pretrained(path)",
        "eval(text)",
    ],
)
def test_the_scan_sees_what_it_looks_for(bad: str) -> None:
    assert dangers(bad)


def test_every_flow_keeps_its_results_as_json() -> None:
    found = {}
    for module in pkgutil.iter_modules(flows.__path__, "flows."):
        found |= {item.name: item for item in vars(importlib.import_module(module.name)).values() if isinstance(item, Flow)}
    assert "rl-step" in found
    assert {name: item.result_serializer for name, item in found.items()} == dict.fromkeys(found, "json")


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", "", ".hidden", "a\nb", "a%2fb", "x" * 81])
def test_a_name_that_would_leave_its_folder_is_refused(name: str) -> None:
    for changes in ({"name": name}, {"tracking": {"experiment": name}}):
        with pytest.raises(ValidationError, match="must be 1 to 80 letters"):
            RunConfig.model_validate(changes)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "runs/../../x"])
def test_a_record_of_a_file_outside_the_workspace_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="stay in it"):
        File(path=path, sha256="", num_bytes=0)


@pytest.mark.parametrize("name", ["../evil.reward", "a/b.reward", ".reward", "module.", "os;x.y"])
def test_a_reward_that_is_no_dotted_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown"):
        rewards.check_name(name)


@pytest.mark.parametrize("flag", ["--host", "--host=0.0.0.0", "--port", "--api-key", "--api", "--admin-api-key=x", "--config"])
def test_flags_that_would_open_the_engine_are_refused(flag: str) -> None:
    with pytest.raises(ValidationError, match="which Ratchet sets"):
        EngineConfig(extra_flags=(flag, "x"))


def test_other_flags_of_the_engine_are_free() -> None:
    EngineConfig(extra_flags=("--schedule-policy", "lpm", "--attention-backend", "fa3", "--trust-remote-code"))


@pytest.mark.parametrize(
    "uri",
    ["http://me:hunter2@elsewhere:5000", "https://hunter2@elsewhere", "postgresql://elsewhere/mlflow?user=me&password=hunter2"],
)
def test_a_password_in_an_address_is_refused_without_being_shown(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MLFLOW_URI", uri)
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_PREFECT_AUTH", "me:hunter2")
    loaded = Settings()
    assert loaded.prefect_auth is not None and loaded.prefect_auth.get_secret_value() == "me:hunter2"
    assert "hunter2" not in f"{loaded!r} {loaded} {loaded.model_dump_json()}"
    monkeypatch.setenv("RATCHET_PREFECT_AUTH", "hunter2")
    with pytest.raises(ValidationError, match="must be user:password") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["postgresql://me:hunter2@host/db", "sqlite:///hunter2", "postgresql+asyncpg://me:hunter2@host"]
)
def test_a_database_that_prefect_could_not_use_is_refused_without_being_shown(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_PREFECT_DATABASE", address)
    with pytest.raises(ValidationError, match=r"must be postgresql\+asyncpg://user:password@host:port/database") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("RATCHET_PREFECT_DATABASE", "postgresql+asyncpg://me:hunter2@host/db")
    assert "hunter2" not in f"{Settings()!r} {Settings().model_dump_json()}"


def test_a_host_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOST", "everywhere")
    with pytest.raises(ValidationError, match="no IP address"):
        Settings()


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////data/mlflow.db",
        "http://elsewhere:5000",
        "postgresql://me@elsewhere/mlflow?sslkey=/keys/mine",
        "databricks://profile",
    ],
)
def test_an_address_without_secrets_is_free(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MLFLOW_URI", uri)
    assert Settings().mlflow_uri == uri


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RATCHET_PREFECT_PORT", "hunter2", r"^RATCHET_PREFECT_PORT: Input should be a valid integer"),
        ("RATCHET_HOST", "everywhere", r"^RATCHET_HOST 'everywhere' is no IP address"),
        ("RATCHET_CLUSTER_NODES", "2", r"^RATCHET_CLUSTER_NODES 2 needs RATCHET_CLUSTER_ADDRESS"),
        ("RATCHET_ENGINE_GPUS", "0,1", r"^RATCHET_ENGINE_GPUS is no list in JSON: give one such as \[0, 1\]$"),
        ("RATCHET_HOTS", "hunter2", r"^RATCHET_HOTS is no setting of ours; the nearest is RATCHET_HOST,"),
    ],
)
def test_a_variable_that_does_not_fit_or_is_none_of_ours_is_named_in_one_line(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    settings.cache_clear()
    with pytest.raises(ValueError, match=said) as caught:
        settings()
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_programs_with_models_get_an_allow_list_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    valid = {
        "RATCHET_PREFECT_AUTH": "user:hunter2",
        "RATCHET_PREFECT_DATABASE": "postgresql+asyncpg://user:hunter2@host/database",
    }
    secret = ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "https_proxy", "VLLM_API_KEY", *SECRETS)
    wanted = (
        "PATH",
        "LD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "TOKENIZERS_PARALLELISM",
        "HF_HOME",
        "RATCHET_WORKSPACE",
    )
    for name in (*secret, *wanted, "MY_LIBRARY_PATH"):
        monkeypatch.setenv(name, valid.get(name, "hunter2"))
    settings.cache_clear()
    found = child_environment.passed_on()
    assert not found.keys() & {*secret, "MY_LIBRARY_PATH"} and found.keys() >= {*wanted}
    monkeypatch.setenv("RATCHET_PASS_ENVIRONMENT", '["MY_LIBRARY_PATH", "OPENAI_API_KEY"]')
    settings.cache_clear()
    assert child_environment.passed_on().keys() >= {"MY_LIBRARY_PATH", "OPENAI_API_KEY"}


def test_the_setting_for_further_variables_holds_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_PASS_ENVIRONMENT", '["MY_KEY=hunter2"]')
    settings.cache_clear()
    with pytest.raises(ValueError, match="RATCHET_PASS_ENVIRONMENT holds something that is no variable's name") as caught:
        settings()
    assert "hunter2" not in str(caught.value)


def test_prefect_is_not_opened_to_the_network_without_a_password(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.services import servers

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("RATCHET_HOST", "0.0.0.0")
    settings.cache_clear()
    with pytest.raises(ValueError, match="set RATCHET_PREFECT_AUTH"):
        servers.ensure_prefect()
    assert not (workspace / "services").exists()


def test_a_command_line_brings_prefects_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_PREFECT_AUTH", "me:hunter2")
    settings.cache_clear()
    monkeypatch.setattr(servers, "ensure_prefect", lambda: "http://127.0.0.1:9/api")
    with with_prefect():
        assert (PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value()) == (
            "http://127.0.0.1:9/api",
            "me:hunter2",
        )
    settings.cache_clear()

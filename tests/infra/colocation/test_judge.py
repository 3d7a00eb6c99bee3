"""Who holds the GPUs when a second model judges: sizes, the plan's words, and what does not fit."""

from math import prod
from pathlib import Path

import pytest
from shared import DENSE_7B

from infra.colocation import judge, plans
from infra.colocation.judge_section import server_of
from infra.colocation.machine import GIB, Machine
from infra.colocation.trainer_memory import Model
from infra.config import RunConfig
from infra.machine import devices
from infra.models.architecture import base_shapes, parse_architecture
from tasks.rewards import by_judge_server

H100 = Machine(is_gpu=True, gpu_bytes=int(79.6 * GIB), is_split=False, host_bytes=125 * GIB)


@pytest.fixture(autouse=True)
def _a_7b_judge_on_a_gpu(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H100")
    architecture = parse_architecture(dict(DENSE_7B))
    model = Model(2 * sum(map(prod, base_shapes(architecture).values())), architecture)
    for module in (plans, judge):
        monkeypatch.setattr(module, "model_in", lambda folder: model)
    monkeypatch.setattr(plans, "this_machine", lambda: H100)


def config_of(model: Path, **server: object) -> RunConfig:
    how = {"by": "model", "model": str(model), "rubric": "{completion}", "max_output_tokens": 64, "server": server}
    return RunConfig(model=str(model)).but(reward={"name": "rubric", "judge": how})


def test_the_plan_says_which_model_holds_the_gpu_when_with_sizes(model_folder: Path) -> None:
    config = config_of(model_folder)
    words = plans.resolve_colocation(config).plan.judge
    first, second, third, last = words.replace(". The judge", "; The judge").split("; ")
    assert first.startswith(f"rollout: engine with {model_folder} (14 GiB of weights) (GiB of each GPU: engine 66.2, judge ")
    assert second.startswith(f"judging: judge with {model_folder} (14 GiB of weights) (GiB of each GPU: judge 50.3, ")
    assert third.startswith(f"training: trainer with {model_folder} (14 GiB")
    assert last == "The judge sleeps by plan offload, with a copy of its weights on the host"
    assert plans.resolve_colocation(RunConfig(model=str(model_folder))).plan.judge == ""


def test_a_sleeping_judge_takes_room_of_the_trainer_and_one_by_restart_takes_none(model_folder: Path) -> None:
    config, without = config_of(model_folder), RunConfig(model=str(model_folder))
    kept = plans.machine_of(config).judge_bytes
    assert 2 * GIB < kept < 4 * GIB and plans.machine_of(without).judge_bytes == 0
    assert plans.machine_of(config_of(model_folder, colocation="restart")).judge_bytes == 0
    model, engine = plans.model_in(model_folder), without.engine.but(colocation="reload")
    left, less = (plans.left_to_trainer_bytes(engine, model, machine) for machine in (H100, H100._replace(judge_bytes=kept)))
    assert left - less == kept
    assert f"{kept / GIB:.0f} of them for the judge that sleeps there" in plans.plan(config).reason


def test_what_does_not_fit_beside_the_other_is_refused_with_its_sizes(model_folder: Path) -> None:
    config = config_of(model_folder, memory_fraction=0.98)
    found = plans.resolve_colocation(config)
    with pytest.raises(ValueError, match=r"judging takes 8\d GiB of a GPU with 80 .*lower reward.judge.server.memory_fraction"):
        judge.check_room(config, found.engine, found.trainer, H100)
    fits = config_of(model_folder)
    judge.check_room(fits, found.engine, found.trainer, H100)
    with pytest.raises(ValueError, match=r"rollout takes .*lower engine.memory_fraction"):
        judge.check_room(fits, found.engine.but(memory_fraction=0.97), found.trainer, H100)


def test_engine_and_trainer_with_gpus_of_their_own_are_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "this_machine", lambda: H100._replace(is_split=True))
    with pytest.raises(ValueError, match=r"RATCHET_ENGINE_GPUS and RATCHET_TRAINER_GPUS with reward\.judge\.by 'model'"):
        by_judge_server.check_turns(config_of(model_folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such"}, "reward.judge.model: model '/no/such' is no folder"),
        ({"server": {"max_context_tokens": 4096}}, "reward.judge.server.max_context_tokens 4096 is more than the 512 positions"),
    ],
)
def test_a_model_that_cannot_judge_is_refused_before_the_run(model_folder: Path, change: dict[str, object], message: str) -> None:
    reward = config_of(model_folder, max_context_tokens=512, max_running_requests=8).reward
    by_judge_server.check_model(reward)
    with pytest.raises(ValueError, match=message):
        by_judge_server.check_model(reward.but(judge=reward.judge.but(**change)))


def test_a_folder_without_a_chat_template_is_refused(model_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (bare / name).write_bytes((model_folder / name).read_bytes())
    reward = config_of(bare, max_context_tokens=512).reward
    with pytest.raises(ValueError, match=r"reward.judge.model: .*chat template"):
        by_judge_server.check_model(reward)


def test_its_server_is_an_engine_without_adapters_by_the_engines_own_deadlines(model_folder: Path) -> None:
    config = config_of(model_folder, memory_fraction=0.4, colocation="reload")
    found = server_of(config.engine.but(request_timeout_s=77, tensor_parallel=2), config.reward.judge)
    assert (found.lora_mode, found.memory_fraction, found.colocation) == ("merged", 0.4, "reload")
    assert (found.request_timeout_s, found.tensor_parallel, found.deterministic) == (77, 2, config.engine.deterministic)

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared import write_manifest, write_zero_weights

from infra.cluster import connection
from infra.config import ATTENTION, DataConfig, EngineConfig, RewardConfig, RunConfig
from infra.data import prompts
from infra.engines.vllm import engine as vllm
from infra.machine import devices, nvml
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.models.base_model import SUPPORTED
from infra.records import AdapterVersion, File, Step
from infra.runs.lineage import adapter_at, next_step
from infra.settings import settings
from infra.store.files import read_json, run_id, write_json
from infra.store.layout import run_folder
from tasks import draw_prompts
from tasks.open_step import open_step
from tasks.support import preflight
from tasks.support.preflight import check, check_evaluation, check_run, check_step, open_run


@pytest.fixture
def config(workspace: Path, model_folder: Path) -> RunConfig:
    return RunConfig(name="mine", model=str(model_folder), seed=5, engine=EngineConfig(kind="scripted"))


def commit(config: RunConfig, step: int) -> AdapterVersion:
    """Leave behind what the last task of a step does."""
    start = adapter_at(config, step)
    weights = File(path=f"runs/{config.name}/adapters/{step + 1:06d}/x", sha256=f"{step:064d}", num_bytes=1)
    made = start.model_copy(update={"version": step + 1, "weights": weights})
    write_manifest(config, start, made)
    return made


def begin(config: RunConfig, step: int | None = None) -> tuple[Step, AdapterVersion]:
    """Check, then begin a step, as its flow does."""
    check(config)
    return open_step.fn(config, step)


def refusal_of(config: RunConfig, step: int | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        begin(config, step)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_first_step_starts_from_the_base_model(config: RunConfig) -> None:
    step, adapter = begin(config, None)
    assert step == Step(run="mine", index=0, seed=5)
    assert (adapter.run, adapter.version, adapter.weights, adapter.sha256) == ("mine", 0, None, "base")
    assert (adapter.rank, adapter.alpha, adapter.seed) == (config.trainer.lora.rank, config.trainer.lora.alpha, 5)
    assert adapter.target_modules == config.trainer.lora.target_modules
    assert adapter.base.id == config.model


def test_a_base_model_that_changed_under_a_run_is_refused(config: RunConfig, tmp_path: Path) -> None:
    """A folder that was written over, a hub model that moved: weights, or no more than the chat template."""
    config = config.but(model=str(shutil.copytree(config.model, tmp_path / "base")))
    begin(config, None)
    before = commit(config, 0).base.sha256
    template = tmp_path / "base/tokenizer_config.json"
    was = template.read_text()
    template.write_text(was + " ")
    refusal = refusal_of(config)
    assert refusal.startswith(f"base model {config.model!r} is not what run 'mine' was begun with: the digest of its files is ")
    assert f"recorded was {before}. Put the files back" in refusal and config.model in refusal.partition("Put")[2]
    for refused in (check_run, check_step):
        with pytest.raises(ValueError, match=r"^base model .* is not what run 'mine' was begun with"):
            refused(config)
    check_run(config.but(name="another"))
    template.write_text(was)
    begin(config, None)


def test_a_persistent_trainer_on_a_cluster_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "check_installed", lambda: None)
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "node0:6379")
    settings.cache_clear()
    persistent = config.but(trainer=config.trainer.but(mode="persistent"))
    assert refusal_of(persistent).startswith("trainer.mode 'persistent' with RATCHET_CLUSTER_ADDRESS: over several nodes")


def test_what_a_step_runs_with_is_written_beside_its_results(config: RunConfig, workspace: Path) -> None:
    begin(config, None)
    for path in (workspace / "runs/mine/config.json", workspace / "runs/mine/steps/000000/config.json"):
        assert RunConfig.model_validate(read_json(path)) == config
    assert abs(read_json(workspace / "runs/mine/steps/000000/began.json")["at"] - time.time()) < 60


def test_each_step_goes_on_from_the_adapter_of_the_one_before(config: RunConfig) -> None:
    for index in range(3):
        step, adapter = begin(config, None)
        assert (step.index, adapter.version) == (index, index)
        made = commit(config, index)
    assert begin(config, 3) == (Step(run="mine", index=3, seed=5), made)


def test_a_step_without_a_manifest_is_made_again(config: RunConfig, workspace: Path) -> None:
    begin(config, None)
    commit(config, 0)
    begin(config, None)
    (workspace / "runs/mine/steps/000001/report.json").touch()
    assert next_step("mine") == 1
    assert begin(config, 1)[0].index == 1
    assert next_step("another") == 0


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_step_that_is_not_the_next_is_refused(config: RunConfig, step: int) -> None:
    begin(config, None)
    commit(config, 0)
    assert refusal_of(config, step) == (f"step {step} of run 'mine' cannot be made now: 1 steps are committed, the next is 1")


def test_a_step_that_cannot_be_made_leaves_no_run(config: RunConfig, workspace: Path) -> None:
    assert "step 99 of run 'mine' cannot be made now" in refusal_of(config, 99)
    assert not run_folder("mine").exists()


def test_a_run_may_not_become_another_one_and_the_difference_is_shown(config: RunConfig) -> None:
    begin(config, None)
    commit(config, 0)
    lora = config.trainer.lora
    for changed, named in (
        (config.but(seed=6), "seed 5 -> 6"),
        (config.but(trainer=config.trainer.but(lora=lora.but(rank=4))), "trainer.lora.rank 8 -> 4"),
        (config.but(data=config.data.but(num_prompts=2)), "data.num_prompts 16 -> 2"),
    ):
        message = refusal_of(changed)
        assert message.startswith(f"run 'mine' was begun with another configuration and cannot go on with this one: {named}. ")
        assert begin(changed.but(name=f"new-{hash(changed)}"), None)[0].index == 0


def test_a_run_that_has_committed_nothing_is_begun_again_with_another_configuration(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    begin(config, None)
    before, other = run_id("mine"), config.but(seed=6)
    (run_folder("mine") / "steps/000000/samples.journal").write_text("of the other configuration")
    open_run(other, nothing_committed="leave")
    assert read_json(run_folder("mine") / "config.json")["seed"] == 5
    with pytest.raises(ValueError, match="seed 5 -> 6"):
        open_run(other)
    step, _ = begin(other, None)
    assert (step.index, step.seed) == (0, 6)
    assert read_json(run_folder("mine") / "config.json")["seed"] == 6 and run_id("mine") != before
    assert not (run_folder("mine") / "steps/000000/samples.journal").exists()
    assert "run mine has committed nothing and is begun again, with another configuration: " in caplog.text


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"lora_mode": "merged"}, "engine.lora_mode 'merged' with vLLM is not supported"),
        ({"max_lora_rank": 1024}, "engine.max_lora_rank 1024 is more than vLLM's largest"),
        ({"colocation": "reload"}, "engine.colocation 'reload' with vLLM 0.26.0: it cannot read its weights again"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_a_run_is_begun(
    config: RunConfig, engine: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "installed", lambda *_: SimpleNamespace(version="0.26.0"))
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    assert refusal_of(config.but(engine=EngineConfig(kind="vllm", **engine))).startswith(said)
    assert not run_folder("mine").exists()


def test_a_run_may_change_how_it_is_made(config: RunConfig) -> None:
    begin(config, None)
    changed = config.but(trainer=config.trainer.but(learning_rate=1e-5), num_steps=50)
    open_run(changed)
    begin(changed, None)
    assert RunConfig.model_validate(read_json(run_folder("mine") / "config.json")) == config
    assert RunConfig.model_validate(read_json(run_folder("mine") / "steps/000000/config.json")) == changed


def model_with(folder: Path, **about: object) -> Callable[[Path], Path]:
    def make(target: Path) -> Path:
        shutil.copytree(folder, target)
        config = json.loads((target / "config.json").read_text()) | about
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


def test_a_model_that_cannot_be_trained_is_refused_with_those_that_can(
    config: RunConfig, model_folder: Path, tmp_path: Path
) -> None:
    known = f"supported are {', '.join(f'{name} ({what})' for name, what in SUPPORTED.items())}"
    bert = model_with(model_folder, architectures=["BertForMaskedLM"])(tmp_path / "bert")
    assert refusal_of(config.but(model=str(bert))).startswith(f"model folder {bert} holds BertForMaskedLM; {known}")
    nameless = model_with(model_folder, architectures=None)(tmp_path / "nameless")
    assert refusal_of(config.but(model=str(nameless))).startswith(f"model folder {nameless} holds no architecture; {known}")
    (tmp_path / "empty").mkdir()
    assert refusal_of(config.but(model=str(tmp_path / "empty"))).startswith(
        f"model folder {tmp_path / 'empty'} has no config.json"
    )
    hollow = model_with(model_folder)(tmp_path / "hollow")
    (hollow / "model.safetensors").unlink()
    assert refusal_of(config.but(model=str(hollow))) == f"model folder {hollow} has no *.safetensors"
    assert refusal_of(config.but(model="./nowhere")).startswith("model './nowhere' is no folder; give a Hugging Face folder")


def test_a_context_that_the_model_was_not_made_for_is_refused(config: RunConfig) -> None:
    assert begin(config.but(engine=config.engine.but(max_context_tokens=512)), None)
    assert refusal_of(config.but(engine=config.engine.but(max_context_tokens=513))) == (
        f"engine.max_context_tokens 513 is more than the 512 positions of model {config.model!r}"
    )


def test_a_layout_that_the_model_cannot_have_is_refused(config: RunConfig) -> None:
    two, four = (config.trainer.but(num_processes=n, tensor_parallel=n) for n in (2, 4))
    assert begin(config.but(trainer=two), None)
    message = refusal_of(config.but(trainer=four))
    assert message.startswith("trainer: tensor_parallel 4 does not divide the model (2 key-value heads, 4 heads")
    assert message.endswith("; 1, 2 would")


def test_a_model_with_a_field_that_may_change_its_numbers_is_refused(
    config: RunConfig, model_folder: Path, tmp_path: Path
) -> None:
    scaled = model_with(model_folder, logit_scale=2.0)(tmp_path / "scaled")
    assert refusal_of(config.but(model=str(scaled))).startswith(
        f"{scaled}/config.json: logit_scale 2.0 is not known to this trainer"
    )


def test_a_run_keeps_its_id_and_a_new_one_of_its_name_has_another(config: RunConfig) -> None:
    assert run_id("mine") == ""
    begin(config, None)
    first = run_id("mine")
    begin(config, None)
    assert run_id("mine") == first != ""
    shutil.rmtree(run_folder("mine"))
    begin(config, None)
    assert run_id("mine") not in ("", first)


def test_an_unknown_reward_is_refused(config: RunConfig) -> None:
    assert refusal_of(config.but(reward=RewardConfig(name="gsm8k_numerc"))).startswith(
        "reward 'gsm8k_numerc' is unknown; the nearest is gsm8k_numeric; known are"
    )


def test_a_data_set_that_does_not_exist_is_refused(config: RunConfig) -> None:
    assert refusal_of(config.but(data=DataConfig(source="./nowhere.jsonl"))).startswith(
        "data set './nowhere.jsonl' does not exist"
    )


def test_an_engine_that_is_not_installed_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_SGLANG_PYTHON", "/nowhere/python")
    settings.cache_clear()
    assert refusal_of(config.but(engine=EngineConfig())).startswith("SGLang's interpreter /nowhere/python does not exist: run ")


def test_a_reward_of_ones_own_without_answers_is_refused_before_the_run_and_before_evaluations(
    config: RunConfig, tmp_path: Path
) -> None:
    (reward := tmp_path / "mine.py").write_text("def score(*, completion, answer): return 0.0\n")
    (data := tmp_path / "data.jsonl").write_text('{"question": "1?", "solution": "1"}\n{"question": "2?", "solution": "2"}\n')
    without, own = DataConfig(source=str(data), allow_repeats=True), RewardConfig(name=f"{reward}:score", workers=1)
    assert "takes 'answer', and none of the 2 rows of data set " in refusal_of(config.but(reward=own, data=without))
    asked = config.but(reward=own, evaluation={"every": 1, "sets": [{"name": "held", "data": {"source": str(data)}}]})
    with pytest.raises(ValueError, match=r"^evaluation set 'held': reward .* takes 'answer', and none of the 2 rows"):
        check_evaluation(asked)


def lines_of(path: Path, questions: Sequence[str]) -> DataConfig:
    path.write_text("".join(json.dumps({"question": question, "answer": "#### 1"}) + "\n" for question in questions))
    return DataConfig(source=str(path))


def test_fewer_rows_than_prompts_of_a_step_are_refused_with_counts(config: RunConfig, tmp_path: Path) -> None:
    one = lines_of(tmp_path / "one.jsonl", ["1 + 0?"])
    message = refusal_of(config.but(data=one, evaluation=config.evaluation.but(every=0)))
    assert message.startswith(f"data set {one.source!r} has 1 usable row for the 16 prompts of a step (data.num_prompts 16): ")
    assert "data.allow_repeats" in message
    begin(config.but(data=one.but(allow_repeats=True), evaluation=config.evaluation.but(every=0)), None)


def test_a_single_file_is_refused_where_too_few_rows_remain_beside_the_held_out_ones(config: RunConfig, tmp_path: Path) -> None:
    few = lines_of(tmp_path / "few.jsonl", [f"{n} + 1?" for n in range(20)])
    message = refusal_of(config.but(data=few))
    assert "has 15 usable rows, beside the 5 that are left for evaluations, for the 16 prompts of a step" in message
    begin(config.but(data=few.but(num_prompts=15)), None)


def test_the_held_out_part_is_shown_and_never_drawn(config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = config.but(data=lines_of(tmp_path / "own.jsonl", [f"{n} + 1?" for n in range(80)]))
    with caplog.at_level("INFO"):
        check_run(own)
    assert "20 of the 80 rows of " in caplog.text and "are held out for evaluations and never trained on" in caplog.text
    assert "are in the training set too" not in caplog.text
    folder = Path(own.model)
    asked = {prompt.question for prompt in prompts.held_out(own.eval_config.data, folder)}
    drawn = [prompts.draw(own.training, folder, step=step, seed=own.seed) for step in range(10)]
    assert len(asked) == 20 and not asked & {prompt.question for step in drawn for prompt in step}
    caplog.clear()
    with caplog.at_level("INFO"):
        draw_prompts.drawn(own.training, *begin(own, None))
    assert "own.jsonl: 80 rows; 20 held out for evaluations\n" in caplog.text


def test_data_whose_answers_are_in_another_column_names_the_field_for_it(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "solutions.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "solution": str(n + 1)}) + "\n" for n in range(40)))
    message = refusal_of(config.but(data=DataConfig(source=str(path)), evaluation=config.evaluation.but(every=0)))
    assert message == (
        f"reward 'gsm8k_numeric' needs answers, and none of the 40 rows of data set {str(path)!r} has one: name their column with "
        "data.answer_column; there are question, solution"
    )


def test_answers_that_the_reward_cannot_read_are_refused_before_the_run(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "sentences.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"Answer is {n + 1}."}) + "\n" for n in range(40)))
    data = DataConfig(source=str(path))
    message = refusal_of(config.but(data=data, evaluation=config.evaluation.but(every=0)))
    assert message.startswith(
        f"reward 'gsm8k_numeric' gives 40 of 40 rows of data set {str(path)!r} less than 1 for their own answers: "
    )
    assert "row 0 'Answer is 1.', row 1 'Answer is 2.', row 2 'Answer is 3.', ..." in message
    elsewhere = config.but(evaluation=config.evaluation.but(source=str(path)))
    with pytest.raises(ValueError, match=r"^evaluation: reward 'gsm8k_numeric' gives 40 of 40 rows"):
        check_run(elsewhere)


def test_a_row_that_one_of_several_built_in_rewards_cannot_use_is_refused_before_the_run(
    config: RunConfig, tmp_path: Path
) -> None:
    path = tmp_path / "patterns.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "pattern": "*" if n == 5 else "1"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    several = RewardConfig.model_validate({"functions": [{"name": "gsm8k_numeric"}, {"name": "regex_match"}]})
    alone = config.but(reward=several, evaluation=config.evaluation.but(every=0))
    assert refusal_of(alone.but(data=DataConfig(source=str(path)))) == (
        f"reward 'regex_match' cannot judge by row 5 of data set {str(path)!r}: the row's column 'pattern' '*' is no regular expression of "
        "Python's re: nothing to repeat at position 0: correct it"
    )
    asked = config.but(reward=several, evaluation=config.evaluation.but(source=str(path), num_prompts=40))
    with pytest.raises(ValueError, match=r"^evaluation: reward 'regex_match' cannot judge by row 5 of data set"):
        check_evaluation(asked)


def test_copies_of_one_question_are_refused_with_counts(config: RunConfig, tmp_path: Path) -> None:
    copies = lines_of(tmp_path / "copies.jsonl", ["1 + 0?", "1 +  0?"] * 20)
    alone = config.but(evaluation=config.evaluation.but(every=0))
    message = refusal_of(alone.but(data=copies))
    assert message.startswith(f"step 0 would have 16 prompts of data set {copies.source!r}, 16 of them with equal text ('1 + ")
    begin(alone.but(name="allowed", data=copies.but(allow_repeats=True)), None)


def test_a_step_that_chance_fills_with_one_question_is_found_before_the_run(config: RunConfig, tmp_path: Path) -> None:
    """12 copies among 40 rows: one step of 4 prompts in fifty or so has three of them."""
    mixed = lines_of(tmp_path / "mixed.jsonl", ["1 + 0?"] * 12 + [f"{n} - {n - 1}?" for n in range(28)]).but(num_prompts=4)
    long = config.but(data=mixed, evaluation=config.evaluation.but(every=0), num_steps=500, seed=1)
    assert re.match(r"step [1-9][0-9]* would have 4 prompts of data set .*, [34] of them with equal text", refusal_of(long))


def test_some_rows_of_equal_text_are_counted_and_warned_of(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some = lines_of(tmp_path / "some.jsonl", ["1 + 0?"] * 3 + [f"{n} - {n - 1}?" for n in range(37)])
    begin(config.but(data=some, evaluation=config.evaluation.but(every=0)), None)
    assert f"2 of 40 rows of data set {some.source!r} repeat the text of another row (3 times '1 + 0?')" in caplog.text


def test_a_host_without_room_for_what_engine_and_trainer_hold_there_is_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(asked: RunConfig) -> None:
        raise ValueError(f"no room for {asked.name}")

    monkeypatch.setattr("infra.colocation.plans.check_host", refuse)
    assert refusal_of(config) == "no room for mine"


def test_a_split_without_gpus_for_each_is_refused(config: RunConfig) -> None:
    assert refusal_of(config.but(engine=EngineConfig(colocation="separate_gpus"))).startswith(
        "engine.colocation 'separate_gpus' needs GPUs for each"
    )


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"engine": {"tensor_parallel": 4}}, {}, "engine.tensor_parallel asks for 4 GPUs of this machine, there are 2"),
        ({"trainer": {"num_processes": 3}}, {}, "trainer.num_processes asks for 3 GPUs of this machine, there are 2"),
        (
            {"engine": {"tensor_parallel": 2}},
            {"ENGINE": "[1]", "TRAINER": "[0]"},
            "engine.tensor_parallel asks for 2 GPUs of this",
        ),
        ({}, {"ENGINE": "[0]", "TRAINER": "[7]"}, "RATCHET_TRAINER_GPUS names GPU 7; this process may use 0, 1"),
    ],
)
def test_gpus_that_are_not_there_are_not_asked_for(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, int]], gpus: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "numbers", lambda: (0, 1))
    for program, numbers in gpus.items():
        monkeypatch.setenv(f"RATCHET_{program}_GPUS", numbers)
    settings.cache_clear()
    sections = {name: getattr(config, name).but(**fields) for name, fields in changes.items()}
    assert refusal_of(config.but(**sections)).startswith(message)


def test_an_engine_that_is_larger_than_a_node_of_a_cluster_is_left_to_its_placement(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "numbers", lambda: (0, 1))
    large = config.but(engine=EngineConfig(kind="sglang", tensor_parallel=4))
    with pytest.raises(ValueError, match=r"^engine.tensor_parallel asks for 4 GPUs of this machine, there are 2"):
        preflight._check_gpus(large)
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "10.0.0.1:6379")
    settings.cache_clear()
    preflight._check_gpus(large)


def test_an_engine_that_cannot_split_the_model_is_refused_on_gpus(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config.but(engine=EngineConfig(kind="sglang", tensor_parallel=3))
    architecture = read_architecture(base_model.locate(config.model))
    preflight._check_serving(asked, architecture)
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    with pytest.raises(ValueError, match=r"^engine.tensor_parallel 3 does not divide the model \(.*\); 1, 2, .* would"):
        preflight._check_serving(asked, architecture)


def test_replicas_that_would_share_a_gpu_that_has_no_room_for_them_are_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "numbers", lambda: (0, 1))
    crowded = EngineConfig(kind="sglang", replicas=4)
    with pytest.raises(
        ValueError,
        match=r"^engine.replicas 4 of 1 GPUs on 2: 2 share a GPU, and each would take engine.memory_fraction 0.8 of it: set that below 0.50",
    ):
        preflight._check_gpus(config.but(engine=crowded))
    preflight._check_gpus(config.but(engine=crowded.but(memory_fraction=0.45)))
    preflight._check_gpus(config.but(engine=crowded.but(replicas="auto")))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"tensor_parallel": 3},
            "engine.tensor_parallel 3 with RATCHET_CLUSTER_ENGINE_NODES 2: each node has to get as many GPUs",
        ),
        (
            {"tensor_parallel": 2, "kind": "vllm"},
            "engine.kind 'vllm' with RATCHET_CLUSTER_ENGINE_NODES 2: only sglang can be over several nodes",
        ),
    ],
)
def test_an_engine_that_cannot_be_over_the_nodes_that_were_set_is_refused_without_the_cluster(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], message: str
) -> None:
    for name, value in (("ADDRESS", "10.0.0.1:6379"), ("ENGINE_NODES", "2"), ("TRUSTED_NETWORK", "10.0.0.0/24")):
        monkeypatch.setenv(f"RATCHET_CLUSTER_{name}", value)
    settings.cache_clear()
    with pytest.raises(ValueError, match=f"^{message}"):
        connection.check_engine(EngineConfig(**engine))


def test_sampling_ahead_where_engine_and_trainer_take_turns_is_refused(config: RunConfig) -> None:
    loss = config.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1})
    ahead = config.but(trainer=config.trainer.but(loss=loss))
    assert refusal_of(ahead.but(engine=EngineConfig(colocation="reload"))).startswith(
        "trainer.loss.correction.max_staleness 1 has the engine sample while the trainer works, with colocation plan 'reload' they "
        "take turns: give each"
    )


def test_on_a_cluster_nothing_has_gpus_of_its_own(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = config.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1})
    ahead = config.but(trainer=config.trainer.but(loss=loss))
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "10.0.0.1:6379")
    settings.cache_clear()
    with pytest.raises(ValueError, match=r"with colocation plan 'reload' they take turns: set it to 0$"):
        preflight._check_age(ahead, "reload")
    layout = {"engine": EngineConfig(colocation="separate_gpus"), "trainer": config.trainer.but(first_gpu=1)}
    assert refusal_of(config.but(**layout)).startswith(
        "engine.colocation 'separate_gpus' with RATCHET_CLUSTER_ADDRESS 10.0.0.1:6379: on a cluster engine and trainer share each node's GPUs"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            b"{broken",
            "config.json cannot be read: it is no JSON (Expecting property name enclosed in double quotes",
        ),
        ("config.json", b"\xff\xfe1", "config.json cannot be read: it is no JSON ('utf-16-le' codec"),
        ("config.json", b"[]", "config.json cannot be read: it holds a list, not an object of names and values"),
        ("config.json", {"architectures": "Qwen3"}, " holds 'Qwen3'; supported are LlamaForCausalLM"),
        ("config.json", {"max_position_embeddings": None}, "config.json: max_position_embeddings None must be a whole number"),
        (
            "config.json",
            {"max_position_embeddings": "long"},
            "config.json: max_position_embeddings 'long' must be a whole number",
        ),
        ("config.json", {"hidden_size": "64"}, 'config.json: hidden_size "64" must be a whole number of 1 or more'),
        ("config.json", {"num_attention_heads": 0}, "config.json: num_attention_heads 0 must be a whole number of 1 or more"),
        ("config.json", {"hidden_act": "gelu"}, "config.json: hidden_act 'gelu' is not supported, only 'silu' is"),
        ("generation_config.json", b"", "generation_config.json cannot be read: it is no JSON (Expecting value"),
        (
            "generation_config.json",
            {"eos_token_id": [[1]]},
            "eos_token_id [[1]] must be the number of a token, or a list of them",
        ),
        ("generation_config.json", {"eos_token_id": 2.5}, "eos_token_id 2.5 must be the number of a token, or a list of them"),
        (
            "tokenizer_config.json",
            {"eos_token": None},
            "the tokens that end an answer are none: set eos_token in tokenizer_config.json",
        ),
        (
            "tokenizer_config.json",
            {"eos_token": "<|no|>"},
            "vocab_size 640, the tokens that end an answer are [640]: set eos_token",
        ),
        ("chat_template.jinja", b"hello", "makes one and the same prompt of different questions, such as"),
        ("tokenizer.json", b"{broken", "tokenizer.json cannot be read: it is no JSON (Expecting property name"),
        ("tokenizer.json", b"{}", " cannot be loaded (KeyError: 'added_tokens'): put the model's files tokenizer*.json there"),
    ],
)
def test_a_broken_file_of_a_model_is_named_before_a_run_is_begun(
    config: RunConfig, workspace: Path, tmp_path_factory: pytest.TempPathFactory, name: str, content: object, message: str
) -> None:
    folder = shutil.copytree(config.model, tmp_path_factory.mktemp("broken") / "model")
    before = read_json(folder / name) if (folder / name).exists() and isinstance(content, dict) else {}
    written = content if isinstance(content, bytes) else json.dumps(before | content).encode()
    (folder / name).write_bytes(written)
    refusal = refusal_of(config.but(model=str(folder)))
    assert message in refusal and str(folder) in refusal and "\n" not in refusal, refusal
    assert not (workspace / "runs").exists()


def test_a_workspace_that_cannot_be_used_is_refused(config: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MIN_FREE_GIB", "1e9")
    settings.cache_clear()
    assert f"workspace {workspace} has" in refusal_of(config)
    write_json(workspace / "workspace.json", {"layout": 0})
    assert f"workspace {workspace} has layout 0" in refusal_of(config)


def test_a_refused_configuration_leaves_no_run_behind(config: RunConfig, workspace: Path) -> None:
    refusal_of(config.but(reward=RewardConfig(name="unknown")))
    assert not (workspace / "runs").exists()


def test_experts_with_adapters_are_not_left_to_a_reload_that_would_pass_over_them(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(config.model, tmp_path / "mixture")
    fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    fields |= {"moe_intermediate_size": 16, "norm_topk_prob": True}
    write_json(folder / "config.json", read_json(folder / "config.json") | fields)
    write_zero_weights(folder)
    monkeypatch.setattr(nvml, "numbers", lambda: (0,))
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(nvml, "read", lambda: nvml.Reading())
    config = config.but(model=str(folder), engine=EngineConfig(colocation="reload"))
    assert re.search(
        r"'reload' with .* gate_proj, up_proj, down_proj of a mixture of experts: .* Choose 'offload'", refusal_of(config)
    )
    on_attention = config.trainer.but(lora=config.trainer.lora.but(target_modules=ATTENTION))
    begin(config.but(name="on-attention", trainer=on_attention), None)
    begin(config.but(name="merged", engine=config.engine.but(lora_mode="merged")), None)


def test_a_width_that_sglang_pads_on_a_cpu_is_refused_with_adapters_on_the_mlp(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.support.preflight._check_interpreter", lambda kind: None)
    folder = shutil.copytree(config.model, tmp_path / "narrow")
    config = config.but(model=str(folder), engine=EngineConfig())
    about = read_json(folder / "config.json")
    write_json(folder / "config.json", about | {"intermediate_size": 48})
    write_zero_weights(folder)
    assert re.search(r"intermediate_size 48 of model .* is no multiple of 32: .* 'merged'", refusal_of(config))
    on_attention = config.trainer.but(lora=config.trainer.lora.but(target_modules=ATTENTION))
    check(config.but(trainer=on_attention))
    check(config.but(engine=config.engine.but(lora_mode="merged")))
    write_json(folder / "config.json", about | {"intermediate_size": 64})
    write_zero_weights(folder)
    check(config)
    refusal = refusal_of(config.but(engine=config.engine.but(tensor_parallel=4)))
    assert "no multiple of 128" in refusal

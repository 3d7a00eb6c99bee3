from infra.config import RunConfig
from infra.runs.manifest import environment
from infra.tracking import run_tags


def test_a_run_is_tagged_with_model_data_algorithm_engine_and_sweep() -> None:
    base = RunConfig(name="mine")
    config = base.but(
        batch=base.batch.but(advantage="rloo"),
        trainer=base.trainer.but(loss=base.trainer.loss.but(kind="gspo")),
        tracking=base.tracking.but(sweep="rates"),
    )
    assert run_tags.of_config(config.model_dump(mode="json")) == {
        "ratchet.run": "mine",
        "ratchet.model": "tiny",
        "ratchet.data": "arithmetic",
        "ratchet.reward": "gsm8k_numeric",
        "ratchet.engine": "sglang",
        "ratchet.algorithm": "rloo + gspo",
        "ratchet.sweep": "rates",
    }


def test_a_run_of_no_sweep_has_no_such_tag() -> None:
    assert "ratchet.sweep" not in run_tags.of_config(RunConfig().model_dump(mode="json"))


def test_a_step_is_tagged_with_commit_code_and_the_digest_of_each_lock() -> None:
    now = environment().model_copy(update={"commit": "0123456789abcdef0123456789abcdef01234567-dirty"})
    tags = run_tags.of_manifest(now.model_dump(mode="json"))
    assert tags["mlflow.source.git.commit"] == "0123456789abcdef0123456789abcdef01234567"
    assert tags["ratchet.commit"] == "0123456789ab-dirty"
    assert tags["ratchet.code"] == now.code[:12]
    assert {name: digest for name, digest in tags.items() if name.startswith("ratchet.lock.")} == {
        f"ratchet.lock.{name.removesuffix('.txt')}": digest[:12] for name, digest in now.locks.items()
    }


def test_a_step_without_a_git_checkout_names_no_commit() -> None:
    now = environment().model_copy(update={"commit": ""})
    assert not [name for name in run_tags.of_manifest(now.model_dump(mode="json")) if "commit" in name]


def test_a_step_is_tagged_with_the_versions_and_switches_that_ran() -> None:
    ran = {
        "engine": {"kind": "sglang", "versions": {"sglang": "0.5.18", "SGLANG_X": "1"}},
        "trainer": {"versions": {"torch": "2.13.0"}},
    }
    assert run_tags.of_manifest(ran) == {
        "ratchet.versions.engine": "SGLANG_X 1, sglang 0.5.18",
        "ratchet.versions.trainer": "torch 2.13.0",
    }

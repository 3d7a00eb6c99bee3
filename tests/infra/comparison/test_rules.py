"""Options, order of blocks, statistics and report: what is said, and when nothing may be said."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.cli.program import chosen_by, program
from infra.comparison import report, wall_time
from infra.comparison.config import ComparisonConfig, blocks_of, digest_of
from infra.comparison.measurement.measures import EngineStart, Probe, Provenance, StepMeasures, percentile
from infra.comparison.measurement.memory import MemoryTrace, PhaseMemory
from infra.comparison.report import Results
from infra.comparison.results import results_in, write_output
from infra.comparison.statistics import METRICS, Summary, relative_to_first, summary, verdict
from infra.engines.request_timing import RequestTiming

PUBLISHED = {
    "mode": "inference",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "backends": ("vllm", "sglang"),
    "num_steps": 3,
    "num_rollouts": 16,
    "concurrency": 8,
    "max_input_tokens": 1024,
    "max_output_tokens": 1024,
    "output": "benchmark_results",
    "sglang_python": "auto",
    "vllm_python": "auto",
    "vllm_port": 8100,
    "sglang_port": 8200,
    "tp": 0,
    "gpu_memory_utilization": 0.85,
    "skip_preflight": False,
}


def test_a_comparison_has_a_trainer_with_experts_of_its_own() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.share_experts true in a comparison of engines is not supported"):
        ComparisonConfig.model_validate({**PUBLISHED, "trainer": {"share_experts": True}})


def start(backend: str, *, version: str = "1.0", number: int = 0, left: float = 0.0) -> EngineStart:
    return EngineStart(
        backend=backend,
        round=number,
        start_s=10.0,
        version=version,
        flags=("--flag",),
        colocation="offload",
        reason="because",
        log_path="/log",
        memory_before_gib=left,
        kv_pool_tokens=100,
    )


def step(backend: str, index: int, *, seconds: float = 2.0, number: int = 0, **more: object) -> StepMeasures:
    about = {
        "requests": [RequestTiming(0.1, 1.0, 10), RequestTiming(0.3, 2.0, 10)],
        "rollout_s": seconds,
        "memory": {"inference": PhaseMemory(mean_gib=1, peak_gib=2)},
        "trace": [(0.0, 1.0, "inference"), (1.0, 2.0, "inference")],
        "probe": Probe(base=[-1.0, -2.0], adapter=[-1.5, -2.5]),
    }
    return StepMeasures.model_validate({"backend": backend, "round": number, "step": index} | about | more)


def results(*steps: StepMeasures, starts: tuple[EngineStart, ...] = (), **options: object) -> Results:
    config = ComparisonConfig.model_validate({"num_steps": 3, "rounds": 1} | options)
    return Results(config, "d", starts or (start("vllm"), start("sglang")), steps)


def row(found: Results, name: str) -> report.ComparisonRow:
    return next(row for row in report.rows_of(found) if row.metric.name == name)


def resolved(words: list[str]) -> ComparisonConfig:
    found: ComparisonConfig = chosen_by(["compare-engines", *words]).other(ComparisonConfig())
    return found


def test_options_have_the_published_names_and_defaults() -> None:
    assert {name: getattr(ComparisonConfig(), name) for name in PUBLISHED} == PUBLISHED
    spelled = {name for argument in program()["compare-engines"].assemble_argument_collection() for name in argument.names}
    assert {f"--{name}" for name in PUBLISHED} <= spelled


def test_options_are_read_off_the_model() -> None:
    found = resolved(["--backends", "sglang vllm", "--num-steps", "5", "--skip-preflight", "--trainer.lora.rank", "4"])
    assert (found.backends, found.num_steps, found.skip_preflight, found.trainer.lora.rank) == (("sglang", "vllm"), 5, True, 4)
    assert resolved(["--backends", "vllm", "--backends", "sglang"]).backends == ("vllm", "sglang")
    assert resolved(["--backends", "vllm"]).backends == ("vllm",)
    for wrong in (
        ["--backends", "vllm vllm"],
        ["--backends", "tgi"],
        ["--mode", "both"],
        ["--num-rollouts", "3", "--group-size", "2"],
    ):
        with pytest.raises(ValueError):
            resolved(wrong)


def test_every_second_round_has_the_opposite_order() -> None:
    order = [(block.round, block.backend) for block in blocks_of(ComparisonConfig(rounds=2))]
    assert order == [(0, "vllm"), (0, "sglang"), (1, "sglang"), (1, "vllm")]


def test_all_engines_get_the_same_but_for_names() -> None:
    config = ComparisonConfig(tp=2, concurrency=4)
    vllm, sglang = (config.engine(backend).model_dump(exclude={"kind", "extra_flags"}) for backend in ("vllm", "sglang"))
    assert vllm == sglang
    more = config.but(sglang_flags="--attention-backend fa3", vllm_flags="--enforce-eager")
    assert more.engine("sglang").extra_flags == ("--incremental-streaming-output", "--attention-backend", "fa3")
    assert more.engine("vllm").extra_flags == ("--enforce-eager",)
    assert resolved(["--sglang-flags=--attention-backend fa3"]).sglang_flags == "--attention-backend fa3"
    assert config.speed.ignore_eos and not config.quality.ignore_eos


def test_only_what_changes_figures_makes_another_comparison() -> None:
    base = ComparisonConfig()
    assert digest_of(base, "m") == digest_of(base.but(output="elsewhere", skip_preflight=True), "m")
    assert len({digest_of(base, "m"), digest_of(base, "n"), digest_of(base.but(concurrency=9), "m")}) == 3


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.5, 0.99)] == [2.0, 4.0]
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([7.0], 0.5) == 7.0


def test_figures_of_a_step_follow_from_its_requests_and_parts() -> None:
    made = step("vllm", 0, release_s=1, wake_s=2, reload_s=0.5, training_s=4, lost_s=2)
    figures = made.figures()
    assert figures["tokens_per_s"] == 10
    assert figures["goodput_tokens_per_s"] == 5, "time that was lost to a failed attempt counts there"
    assert figures["ttft_s"] == pytest.approx(0.2)
    assert figures["inter_token_s"] == pytest.approx((0.9 / 9 + 1.7 / 9) / 2)
    assert figures["transition_s"] == 3.5
    assert figures["step_s"] == 9.5
    assert figures["memory_inference_peak_gib"] == 2


def test_a_verdict_needs_enough_values_and_spreads_that_do_not_overlap() -> None:
    metric = {metric.name: metric for metric in METRICS}
    names = ("vllm", "sglang")
    fast, slow, wide = Summary(2, 1, 3, 3), Summary(6, 5, 7, 3), Summary(4, 2, 6, 3)
    assert verdict(metric["ttft_s"], names, fast, slow) == "vllm is better"
    assert verdict(metric["tokens_per_s"], names, fast, slow) == "sglang is better"
    assert verdict(metric["ttft_s"], names, fast, wide) == "no difference beyond the spread"
    assert "too few" in verdict(metric["ttft_s"], names, fast._replace(num=2), slow)
    assert "control" in verdict(metric["training_s"], names, fast, slow)
    assert "not measured" in verdict(metric["ttft_s"], names, None, slow)


def test_medians_come_with_lowest_and_highest() -> None:
    assert summary([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)
    assert summary([]) is None


def test_throughput_is_shown_by_that_of_the_first_step() -> None:
    assert relative_to_first({1: 8.0, 0: 10.0, 2: 5.0}) == {0: 1.0, 1: 0.8, 2: 0.5}
    found = results(*(step("vllm", n, seconds=2.0 + n) for n in range(2)), *(step("sglang", n) for n in range(2)))
    assert report.throughput_by_step(found, "vllm") == {0: 1.0, 1: pytest.approx(2 / 3)}
    assert "| vllm | 1.000 | 0.667 | - |" in report.markdown(found)


def test_an_engine_whose_golden_check_failed_has_no_speed() -> None:
    sound = [step("sglang", n) for n in range(3)]
    failed = [step("vllm", 0), step("vllm", 1, golden="golden check: off by 3 nats", errors=("WrongAnswer",), rollout_s=0)]
    found = results(*sound, *failed)
    assert row(found, "tokens_per_s").summaries["vllm"] is None
    assert row(found, "tokens_per_s").summaries["sglang"] is not None
    assert row(found, "errors").summaries["vllm"] is not None
    assert report.throughput_by_step(found, "vllm") == {}
    assert "vllm has no speed: round 0, step 1: golden check: off by 3 nats" in report.text(found)


def test_a_twin_gets_no_verdict_and_is_named_in_every_output(tmp_path: Path) -> None:
    starts = (start("vllm", version="0.26.0 (scripted twin, not vLLM)"), start("sglang"))
    found = results(*(step(b, n) for b in ("vllm", "sglang") for n in range(3)), starts=starts, output=str(tmp_path))
    assert {each.verdict for each in report.rows_of(found)} == {report.NO_VERDICT}
    for path in write_output(found):
        if path.suffix in (".txt", ".md", ".json"):
            assert "twin" in path.read_text(), path


def test_engines_that_disagree_and_memory_that_was_left_are_said() -> None:
    other = Probe(base=[-5.0, -6.0], adapter=[-1.5, -2.5])
    starts = (start("vllm"), start("sglang", left=9.0))
    said = "\n".join(report.warnings_of(results(step("vllm", 0), step("sglang", 0, probe=other), starts=starts)))
    assert "differ by 4 nats" in said
    assert "before a start of sglang 9.0 GiB of GPU memory were in use" in said


def test_engines_that_had_other_adapters_or_machines_are_compared_in_what_they_share() -> None:
    other = {"adapter_sha256": "b", "probe": Probe(base=[-1.0, -2.0], adapter=[-9.0, -9.0])}
    there = [
        start(backend).model_copy(update={"origin": Provenance(machine="m", unit=unit, code="c", locks="l")})
        for backend, unit in (("vllm", "one"), ("sglang", "two"))
    ]
    found = results(step("vllm", 0, adapter_sha256="a"), step("sglang", 0, **other), starts=tuple(there))
    assert report.agreement(found) == {"base": 0.0}
    said = " ".join(report.warnings_of(found))
    assert "adapters of their own" in said and "different machines" in said
    same = results(step("vllm", 0, adapter_sha256="a"), step("sglang", 0, adapter_sha256="a"), starts=(there[0], there[0]))
    assert report.agreement(same) == {"base": 0.0, "adapter": 0.0}
    assert "adapters of their own" not in (said := " ".join(report.warnings_of(same))) and "different machines" not in said


def test_all_seconds_of_steps_are_accounted_for() -> None:
    steps = [step("vllm", n, seconds=2.0, release_s=1.0, training_s=3.0, checks_s=0.5, wall_s=8.0) for n in range(2)]
    begun = start("vllm").model_copy(update={"warm_up_s": 4.0, "checks_s": 0.25})
    found = wall_time.seconds([begun], steps)
    assert {part: value for part, value in found.items() if value} == {
        "start": 10.0,
        "warm-up": 4.0,
        "rollout": 4.0,
        "release": 2.0,
        "training": 6.0,
        "checks": 1.25,
        "else": 3.0,
    }
    assert "| vllm | 0.0 | 10.0 | 0.0 | 4.0 | 4.0 |" in report.markdown(results(*steps, starts=(begun,), backends="vllm"))


def test_the_output_folder_holds_all_that_a_notebook_needs(tmp_path: Path) -> None:
    found = results(*(step(b, n) for b in ("vllm", "sglang") for n in range(3)), output=str(tmp_path))
    write_output(found)
    assert results_in(tmp_path) == found


def test_memory_is_traced_by_phase() -> None:
    with MemoryTrace() as trace:
        with trace.phase("inference"):
            pass
        with trace.phase("training"):
            pass
    assert trace.of("inference") == PhaseMemory(mean_gib=0, peak_gib=0)
    assert trace.of("training") is not None and trace.of("elsewhere") is None


def test_a_comparison_of_one_engine_has_no_differences() -> None:
    found = results(*(step("vllm", n) for n in range(3)), starts=(start("vllm"),), backends="vllm")
    assert row(found, "tokens_per_s").difference_percent is None
    assert "verdict" not in report.markdown(found)


def test_unknown_options_and_modes_are_refused() -> None:
    with pytest.raises(ValidationError):
        ComparisonConfig.model_validate({"lora_mode": "magic"})
    with pytest.raises(ValueError, match="--api-key"):
        ComparisonConfig(vllm_flags="--api-key x").engine("vllm")

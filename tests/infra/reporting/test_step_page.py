"""What the reports of a step and of a run say."""

import base64
import logging

import pytest

from flows.cli import endings
from infra.config import EvaluationConfig
from infra.eval_records import Evaluation, RunReport
from infra.machine.devices import Plan
from infra.records import AdapterVersion, BaseModelRef, File, StepReport
from infra.reporting import brief_lines, headline_metrics, run_page, sample_text, step_page, step_warnings, svg
from infra.reporting.shown_samples import best_and_worst
from infra.runs.history import Figures, History, LastEvaluation, history_before
from infra.store.files import write_json
from infra.store.layout import run_folder
from infra.store.samples import Sample
from infra.tracking import overview

FLAT, TRUNCATED = "reward/frac_zero_std_groups", "rollout/truncated_frac"
NOW: Figures = {"reward/mean": 0.4, FLAT: 0.75, TRUNCATED: 0.01, "time/step_s": 20.0, "train/other": 1.25}


def adapter(version: int) -> AdapterVersion:
    base = BaseModelRef(id="tiny", sha256="b")
    return AdapterVersion(run="r", version=version, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)


def made(step: int, metrics: Figures) -> StepReport:
    return StepReport(run="r", step=step, adapter=adapter(step + 1), metrics=metrics)


def commit(step: int, metrics: Figures) -> None:
    write_json(run_folder("r") / "steps" / f"{step:06d}" / "report.json", made(step, metrics).model_dump(mode="json"))


def page(report: StepReport, **changes: object) -> str:
    given: dict[str, object] = {
        "before": None,
        "last": None,
        "found": [],
        "samples": [],
        "changes": (),
        "colocation": Plan("offload", "why not", "5120 tokens: room for more"),
        "picture": "timeline.svg",
    }
    return step_page.markdown_of(report, **(given | changes))  # type: ignore[arg-type]


def row_of(markdown: str, label: str) -> list[str]:
    [row] = [line for line in markdown.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip(" *") for cell in row.strip("|").split("|")][1:]


def test_key_figures_come_first_with_units_and_what_changed(workspace: object) -> None:
    commit(2, {"reward/mean": 0.5, FLAT: 0.5, "time/step_s": 10.0})
    last = LastEvaluation(version=3, pass_at_1=0.42, before=0.40, first=0.40)
    markdown = page(made(5, NOW), before={"reward/mean": 0.32, FLAT: 0.70, "time/step_s": 25.0}, last=last)
    assert row_of(markdown, "reward") == ["0.4", "+0.08 (+25.0%)", "-0.1 (-20.0%)", ""]
    assert row_of(markdown, "groups that teach nothing") == ["75.0%", "+5.0 points", "+25.0 points", ""]
    assert row_of(markdown, "time of the step") == ["20 s", "-5 (-20.0%)", "+10 (+100.0%)", ""]
    assert "adapter version 3, pass@1 **42.0%**, +2.0 points since the one before" in markdown
    assert markdown.index("| reward |") < markdown.index("## Warnings") < markdown.index("| other | 1.25 |")
    assert "![time line of step 5](timeline.svg)" in markdown
    assert "Micro-batches of 5120 tokens: room for more" in markdown


def test_the_first_step_has_nothing_to_be_compared_with(workspace: object) -> None:
    assert row_of(page(made(0, NOW)), "reward") == ["0.4", "-", "-", ""]


def test_warnings_stand_with_their_advice_and_calm_steps_say_so() -> None:
    assert "Nothing: none of" in page(made(0, NOW))
    found = step_warnings.triggered(NOW, History([], []))
    assert "| **most groups flat** | `reward/frac_zero_std_groups` 0.75<br>above 0.5: 0.5 | they teach nothing" in page(
        made(0, NOW), found=found
    )


def test_the_best_and_the_worst_of_a_group_are_shown() -> None:
    def sample(index: int, reward: float) -> Sample:
        return Sample(0, index, [1], [2], [-0.1], "stop", 0, "base", reward=reward)

    chosen = best_and_worst([sample(0, 0.3), sample(1, 1.0), sample(2, 0.0)], 8)
    assert [each.sample_index for each in chosen] == [1, 2]


def test_a_late_step_reads_as_few_reports_as_an_early_one(workspace: object) -> None:
    for step in range(40):
        commit(step, {"reward/mean": float(step)})
    before = history_before("r", 40)
    assert [figures["reward/mean"] for figures in before.first] == [0, 1, 2]
    assert [figures["reward/mean"] for figures in before.recent] == list(range(30, 40))


def test_worse_than_before_training_is_seen_in_the_step_after_the_evaluation(workspace: object) -> None:
    last = LastEvaluation(version=4, pass_at_1=0.2, before=0.3, first=0.4)
    found = step_page.triggered_at("r", 4, {"reward/mean": 0.4}, last)
    assert [each.alarm.name for each in found] == ["worse than at first on held-out questions"]
    assert step_page.triggered_at("r", 4, {"reward/mean": 0.4}, last._replace(pass_at_1=0.4)) == []


def evaluation(version: int, passed: float) -> Evaluation:
    return Evaluation(
        run="r",
        step=version,
        adapter_sha256=str(version),
        eval_digest="e",
        file=File(path="greedy.parquet", sha256="f", num_bytes=1),
        num_prompts=64,
        num_overlapping=0,
        pass_at_1=passed,
        pass_at_k={"4": passed + 0.2},
        truncated_frac=0.0,
    )


def run_report(num_steps: int) -> RunReport:
    return RunReport(
        run="r",
        num_steps=num_steps,
        stopped="all steps made",
        latest=adapter(num_steps),
        best=adapter(2),
        evaluations=(evaluation(0, 0.4), evaluation(5, 0.5)),
    )


def test_one_step_is_no_steps() -> None:
    assert [run_report(number).outcome for number in (1, 2)] == ["1 step, all steps made", "2 steps, all steps made"]


def test_a_program_that_is_not_that_of_the_step_before_is_a_warning() -> None:
    changes = ("engine sglang: sglang 0.5.17 -> 0.5.18",)
    warnings = page(made(5, NOW), changes=changes).partition("## Warnings")[2].partition("##")[0]
    assert "* not what the step before ran with: engine sglang: sglang 0.5.17 -\\> 0.5.18" in " ".join(warnings.split("<br>"))
    assert "not what the step before" not in page(made(5, NOW))


def test_a_runs_report_compares_its_ends_and_gathers_warnings_of_all_steps() -> None:
    steps = {step: NOW | {"reward/mean": 0.1 * (step + 1), FLAT: 0.75 if step in (1, 4) else 0.1} for step in range(6)}
    markdown = run_page.markdown_of(
        run_report(6), steps, [], evaluation=EvaluationConfig(), curves_url="curves.svg", timeline_url="t.svg"
    )
    assert row_of(markdown, "reward") == ["0.2", "0.5", "+0.3 (+150.0%)", ""]
    assert "| 5 | **0.500** | +10.0 points | 4: 0.700 | - | - | 0.0% |" in markdown
    assert "| **most groups flat** | 2 (1, 4) |" in markdown
    assert "![curves](curves.svg)" in markdown and "![time line](t.svg)" in markdown


def test_a_run_that_ended_before_its_first_step_has_a_report() -> None:
    empty = run_report(0).model_copy(update={"evaluations": ()})
    markdown = run_page.markdown_of(empty, {}, [], evaluation=EvaluationConfig(), curves_url="c", timeline_url=None)
    assert "None were made" in markdown and "None in any step" in markdown


def test_curves_hold_every_step_and_every_evaluation() -> None:
    steps = {step: {"reward/mean": float(step)} for step in range(3)}
    found = {panel.title: panel.curves for panel in run_page.panels_of(steps, (evaluation(0, 0.4), evaluation(2, 0.6)))}
    assert found["mean reward"] == {"": [(0, 0.0), (1, 1.0), (2, 2.0)]}
    assert found["held-out pass@1"] == {"": [(0, 0.4), (2, 0.6)]}


def test_a_picture_stands_in_markdown_as_it_is() -> None:
    uri = svg.data_uri("<svg/>")
    assert base64.b64decode(uri.partition("base64,")[2]) == b"<svg/>"


def test_each_part_of_a_reward_is_a_row_beside_its_samples_and_a_curve(workspace: object) -> None:
    figures = NOW | {"reward_parts/right/mean": 0.25, "reward_parts/brief/mean": 0.15, "reward_parts/right/std": 0.1}
    assert row_of(page(made(0, figures)), "mean of part right")[0] == "0.25"
    rows: list[dict[str, object]] = [
        {"reward": 1.5, "advantage": 0.5, "prompt": "q", "completion": "x", "parts": {"right": 1.0, "brief": 0.5}},
        {"reward": 1.0, "advantage": -0.5, "prompt": "q", "completion": "y", "parts": {"right": 1.0}},
    ]
    section = sample_text.samples_section(rows)
    assert "**Reward 1.5**, brief 0.5, right 1, advantage +0.5" in section and "**Reward 1**, right 1, advantage -0.5" in section
    assert sample_text.samples_section([rows[0] | {"parts": {"reward": 1.5}}]).startswith("**Reward 1.5**, advantage +0.5")
    found = {panel.title: panel.curves for panel in run_page.panels_of({0: figures, 1: figures}, ())}
    assert found["mean of part brief"] == {"": [(0, 0.15), (1, 0.15)]}
    assert not any(panel.title.startswith("mean of part") for panel in run_page.panels_of({0: NOW}, ()))


def test_headline_figures_come_in_the_order_of_the_questions_and_are_ten_with_the_warnings() -> None:
    labels = [each.label for each in headline_metrics.HEADLINE_METRICS]
    order = ("reward", "pass@1", "groups", "gradient", "entropy", "tokens", "time", "GPU idle", "engine vs trainer")
    assert len(labels) + 1 == 10 and all(label.startswith(begin) for label, begin in zip(labels, order, strict=True))
    figures = {"time/step_s": 12.4, "time/roll_out_s": 4.1, "time/train_s": 1.2, "gpu_idle/to_training_s": 0.5}
    shown = headline_metrics.with_evaluation(figures | {"gpu_idle/to_sampling_s": 0.25}, None)
    known = headline_metrics.known(shown)
    assert [headline_metrics.value(each, shown) for each in known] == ["12.4 s", "0.75 s"]
    assert [headline_metrics.details(each, shown) for each in known] == ["rollout 4.1 s, train 1.2 s", ""]


def test_all_other_figures_are_grouped_by_the_part_of_the_step() -> None:
    grouped = headline_metrics.grouped(
        {"time/step_s": 1.0, "odd/one": 2.0, "reward/std": 0.1, "reward/mean": 0.2, "train/loss": 3.0}
    )
    assert list(grouped) == ["reward", "train", "time", "odd"] and list(grouped["reward"]) == ["mean", "std"]
    assert step_page.all_figures({"reward/mean": 0.5}).splitlines()[0] == "### reward"


def test_a_warning_that_lasts_is_logged_as_a_warning_once(workspace: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infra"):
        for step in range(3):
            figures = NOW if step else NOW | {FLAT: 0.1}
            found = step_page.triggered_at("r", step, figures, None)
            before = (NOW | {FLAT: 0.1} if step == 1 else NOW) if step else None
            step_page.log_warnings(made(step, figures), found, before, None)
            commit(step, figures)
    assert [(record.levelname, record.getMessage()[:24]) for record in caplog.records] == [
        ("WARNING", "step 1, most groups flat"),
        ("INFO", "step 2, most groups flat"),
    ]


def test_the_line_of_a_step_has_a_change_and_no_figure_that_was_not_measured() -> None:
    assert (
        brief_lines.step_line(made(7, NOW), 20, before={"reward/mean": 0.32}, num_warnings=1)
        == "step 7/20  reward 0.40 (+0.08)  20.0 s  warnings 1"
    )


def test_a_step_beyond_the_planned_ones_has_no_part_of_them() -> None:
    assert brief_lines.step_line(made(3, NOW), 2) == "step 3  reward 0.40  20.0 s"


def test_the_end_of_a_run_says_what_ran_otherwise_on_its_page_in_mlflow_and_in_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose engine was another one from step 3 on had no warnings at its end."""
    found = [(3, "engine sglang: torch 2.0 -> 2.1"), (3, "trainer: torch 2.0 -> 2.1")]
    for module in (run_page, overview):
        monkeypatch.setattr(module, "changes_at", lambda run, steps: found)
    line = "not what the step before ran with: engine sglang: torch 2.0 -> 2.1"
    assert "\n* Step 3, not what the step before ran with: engine sglang: torch 2.0 " in run_page.markdown_of(
        RunReport(run="r", num_steps=4, stopped="all steps made", latest=adapter(4), best=adapter(4), evaluations=()),
        {},
        [],
        evaluation=EvaluationConfig(),
        curves_url="",
        timeline_url=None,
    )
    assert overview._warnings("r", {}) == "not what the step before ran with (step 3)"
    endings.print_warnings([], found)
    endings.print_warnings([], [])
    assert capsys.readouterr().out.splitlines() == [
        "warnings",
        f"  step 3: {line}",
        "  step 3: not what the step before ran with: trainer: torch 2.0 -> 2.1",
        "warnings none",
    ]

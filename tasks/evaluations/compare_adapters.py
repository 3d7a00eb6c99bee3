"""Compare two adapters on a set that both were evaluated on, question by question."""

from prefect import task
from prefect.artifacts import create_markdown_artifact

from infra.config import EvalConfig
from infra.data.prompts import Prompt
from infra.eval_records import Difference, Evaluation
from infra.reporting.brief_lines import OF_DIFFERENCE, difference_rows
from infra.runs import eval_figures
from infra.store.files import path_of, read_json_lines
from infra.store.layout import EvaluationFolder
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import key_of


def title_of(made: Evaluation) -> str:
    return f"adapter {made.step} of {made.run}"


def markdown_of(differences: list[Difference]) -> str:
    rows = [f"| {' | '.join(row)} |" for row in (OF_DIFFERENCE, ("--", "--", "--:", "--", "--:"), *difference_rows(differences))]
    title = f"# {differences[0].second} against {differences[0].first}"
    return "\n".join(
        [title, "", *rows, "", "Second minus first, paired by question; standard errors are clustered by question.", ""]
    )


def difference(eval_config: EvalConfig, first: Evaluation, second: Evaluation) -> Difference:
    """Return the second minus the first, from the answers on disk.

    Raises:
        ValueError: for evaluations of different questions.
    """
    if (first.eval_digest, first.dataset_fingerprint) != (second.eval_digest, second.dataset_fingerprint):
        raise ValueError(
            f"{title_of(first)} and {title_of(second)} were evaluated with other questions or another sampling (digests "
            f"{first.eval_digest} and {second.eval_digest}): evaluate both with one configuration"
        )
    values = {mark: [_by_row(eval_config, each, mark) for each in (first, second)] for mark in (None, eval_config.pass_reward)}
    rewards, passed = (eval_figures.paired(*of) for of in values.values())
    return Difference(set_name=first.set_name, first=title_of(first), second=title_of(second), reward=rewards, passed=passed)


def _by_row(eval_config: EvalConfig, made: Evaluation, pass_reward: float | None) -> dict[int, float]:
    """Values by the number of the question's row: models with other tokenizers may leave out other rows."""
    folder = EvaluationFolder(path_of(made.file).parent)
    rows = {prompt.prompt_id: prompt.row_number for prompt in (Prompt(**row) for row in read_json_lines(folder.questions))}
    answers = eval_figures.answers_in(folder.sampled if eval_config.num_samples else folder.greedy)
    return {rows[number]: value for number, value in eval_figures.by_question(answers, pass_reward).items()}


@task(cache_policy=NO_CACHE)
def compare_adapters(eval_configs: list[EvalConfig], first: list[Evaluation], second: list[Evaluation]) -> list[Difference]:
    """Evaluations of two adapters, set by set -> Differences, and a page of them."""
    found = [difference(*each) for each in zip(eval_configs, first, second, strict=True)]
    create_markdown_artifact(
        markdown_of(found),
        key=key_of(f"{first[0].run}/against"),
        description=f"{found[0].second} against {found[0].first}",
    )
    return found

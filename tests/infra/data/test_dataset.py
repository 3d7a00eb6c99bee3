import json
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.config import DataConfig, EvaluationConfig, RunConfig
from infra.data import dataset
from infra.models import hub

# The form of GSM8K: a worked solution with calculator marks, and the final answer behind `#### `.
GSM8K = [
    {"question": "Ann has 3 hats and buys 4. How many has she?", "answer": "She has 3+4=<<3+4=7>>7 hats.\n#### 7"},
    {"question": "A car costs $1,000 and a bike $234. Together?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"},
    {"question": "It is 2 degrees and gets 5 colder. What is it?", "answer": "2-5=<<2-5=-3>>-3 \u00b0C\n#### -3"},
]
Rows = list[dict[str, Any]]


def as_jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([("question", pa.string()), ("answer", pa.string())])), path)
    return path


def columns_of(rows: Sequence[dataset.Row]) -> list[dict[str, Any]]:
    assert all((row.question, row.answer) == (row.columns["question"], row.columns["answer"]) for row in rows)
    return [row.columns for row in rows]


def refusal_of(config: DataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        dataset.rows(config)
    return str(caught.value)


@pytest.mark.parametrize(("write", "name"), [(as_jsonl, "data.jsonl"), (as_jsonl, "data.json"), (as_parquet, "data.parquet")])
def test_a_local_file_is_read_in_its_order(tmp_path: Path, write: Callable[[Path, Rows], Path], name: str) -> None:
    rows = dataset.rows(DataConfig(source=str(write(tmp_path / name, GSM8K))))
    assert columns_of(rows) == GSM8K


def test_columns_may_have_other_names_and_numbers_in_them(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", [{"problem": "1 + 1?", "solution": 2}])
    config = DataConfig(source=str(path), question_column="problem", answer_column="solution")
    assert dataset.rows(config) == (dataset.Row("1 + 1?", "2", {"problem": "1 + 1?", "solution": 2}),)


def test_a_missing_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", GSM8K)
    assert refusal_of(DataConfig(source=str(path), answer_column="solution")) == (
        f"data set {str(path)!r} has no column 'solution'; it has question, answer. data.answer_column names another column"
    )
    assert "has no column 'problem'; it has question, answer" in refusal_of(
        DataConfig(source=str(path), question_column="problem")
    )


def test_a_row_without_an_answer_is_named_by_its_number(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", [GSM8K[0], {"question": "Why?"}])
    assert refusal_of(DataConfig(source=str(path))) == f"data file {path}, row 1 (from 0): it has no 'answer'"


def test_half_of_a_surrogate_pair_is_refused_with_file_row_and_column(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", [GSM8K[0], {"question": "Why \ud83d?", "answer": "2"}])
    assert refusal_of(DataConfig(source=str(path))) == (
        f"data file {path}, row 1 (from 0): column 'question' has '\\ud83d', half of a surrogate pair, which is no character: take it out"
    )


@pytest.mark.parametrize(("question", "kind"), [({"role": "user"}, "a dict"), (42, "an int"), (4.2, "a float"), (True, "a bool")])
def test_a_question_that_is_no_text_is_refused_with_file_row_and_type(tmp_path: Path, question: object, kind: str) -> None:
    path = as_jsonl(tmp_path / "chats.jsonl", [GSM8K[0], {"question": question, "answer": "2"}])
    assert refusal_of(DataConfig(source=str(path))) == (
        f"data file {path}, row 1 (from 0): the question (column 'question') is {kind}, neither text nor a list of chat messages"
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("4", "4"),
        (4, "4"),
        (4.0, "4.0"),
        (0.1, "0.1"),
        (1e30, "1e+30"),
        (True, "true"),
        (False, "false"),
        (-(10**30), str(-(10**30))),
    ],
)
def test_an_answer_that_is_a_number_or_a_bool_becomes_the_text_that_json_writes(
    tmp_path: Path, answer: object, text: str
) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", [{"question": "?", "answer": answer}])
    assert dataset.rows(DataConfig(source=str(path)))[0].answer == text


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(["4"], "a list"), ({"value": 4}, "a dict"), (float("nan"), "the float nan"), (float("inf"), "the float inf")],
)
def test_an_answer_without_one_text_is_refused(tmp_path: Path, answer: object, kind: str) -> None:
    path = as_jsonl(tmp_path / "data.jsonl", [GSM8K[0], {"question": "?", "answer": answer}])
    message = refusal_of(DataConfig(source=str(path)))
    assert message.startswith(f"data file {path}, row 1 (from 0): the answer (column 'answer') is {kind}: ")


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert refusal_of(DataConfig(source=str(tmp_path / "torn.parquet"))).startswith(
        f"data file {tmp_path / 'torn.parquet'} cannot be read: "
    )


def test_a_parquet_file_whose_text_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "bytes.parquet", [{"question": "@@ and 3 more?", "answer": "7"}])
    path.write_bytes(path.read_bytes().replace(b"@@", b"\xeb\xff"))
    assert refusal_of(DataConfig(source=str(path))).startswith(f"data file {path} cannot be read: 'utf-8' codec can't decode")


def test_a_folder_holds_splits_of_one_file_or_several(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "data/train-00001.jsonl", GSM8K[1:2])
    as_jsonl(tmp_path / "data/train-00000.jsonl", GSM8K[:1])
    as_parquet(tmp_path / "data/test.parquet", GSM8K[2:])
    (tmp_path / "data/README.md").write_text("about")
    config = DataConfig(source=str(tmp_path / "data"))
    assert columns_of(dataset.rows(config)) == GSM8K[:2]
    assert columns_of(dataset.rows(config.but(split="test"))) == GSM8K[2:]
    assert refusal_of(config.but(split="dev")).startswith(f"data folder {tmp_path / 'data'} has no dev.jsonl and no dev.parquet")
    as_jsonl(tmp_path / "data/train_unfiltered.jsonl", GSM8K)
    as_jsonl(tmp_path / "data/training.jsonl", GSM8K)
    dataset.loaded.cache_clear()
    assert len(dataset.rows(config)) == 2, "files of other names are no part of the split"


def test_the_configuration_of_a_local_folder_is_a_folder_in_it(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "main/train.jsonl", GSM8K[:1])
    config = DataConfig(source=str(tmp_path), subset="main")
    assert columns_of(dataset.rows(config)) == GSM8K[:1]
    assert refusal_of(config.but(subset="socratic")) == (
        f"data folder {tmp_path / 'socratic'} does not exist: data.subset names a folder in data.source"
    )


def test_a_hub_data_set_is_asked_for_with_configuration_split_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a local folder in the hub's place, whose revisions are folders."""
    as_parquet(tmp_path / "v1/main/train.parquet", GSM8K[:1])
    as_parquet(tmp_path / "v2/main/train.parquet", GSM8K[1:])
    real = datasets.load_dataset

    def load(source: str, subset: str, *, split: str, revision: str | None) -> object:
        assert source == "openai/gsm8k"
        return real(str(tmp_path / (revision or "v2") / subset), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "trouble", lambda: None)
    config = DataConfig(source="openai/gsm8k", subset="main")
    assert columns_of(dataset.rows(config)) == GSM8K[1:]
    assert columns_of(dataset.rows(config.but(revision="v1"))) == GSM8K[:1]


def test_a_revision_that_cannot_be_had_is_named() -> None:
    assert refusal_of(DataConfig(source="no-owner/nothing", revision="v9")).startswith(
        "data set 'no-owner/nothing', revision 'v9', is neither a local path nor to be had from the hub: "
    )


def test_rows_that_do_not_meet_the_filter_are_left_out_before_they_are_checked(tmp_path: Path) -> None:
    rows = [row | {"level": level} for row, level in zip(GSM8K, (1, 2, 3), strict=True)]
    config = DataConfig(
        source=str(as_jsonl(tmp_path / "a.jsonl", [*rows, {"question": None, "level": 0}])), filter=("level >= 2",)
    )
    assert [row.columns["level"] for row in dataset.rows(config)] == [2, 3]
    assert dataset.loaded(config).num_filtered == 2
    assert dataset.fingerprint(config) != dataset.fingerprint(config.but(filter=("level == 2",)))
    assert refusal_of(config.but(filter=("level > 2", "level < 3"))) == (
        f"data.filter 'level > 2' and 'level < 3' leaves none of 4 rows of {config.source!r}"
    )
    assert "there is no column 'levle'" in refusal_of(config.but(filter=("levle > 2",)))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    lines, table = as_jsonl(tmp_path / "empty.jsonl", []), as_parquet(tmp_path / "empty.parquet", [])
    assert refusal_of(DataConfig(source=str(lines))) == f"data set {lines}, split 'train', is empty"
    assert refusal_of(DataConfig(source=str(table))) == f"data set {table}, split 'train', is empty"


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n\n{"question": "1 + 1?", "ans')
    assert refusal_of(DataConfig(source=str(path))).startswith(f"data file {path} cannot be read: line 3 is no JSON: ")


def test_text_is_taken_as_it_stands(tmp_path: Path) -> None:
    """Not what a reader takes it for: dates, or numbers of one kind."""
    answers = ["2024-02-29", 42, 3.5, 10**30]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": "?", "answer": answer}) + "\r\n" for answer in answers))
    assert [row.answer for row in dataset.rows(DataConfig(source=str(path)))] == ["2024-02-29", "42", "3.5", str(10**30)]
    dates = as_jsonl(
        tmp_path / "dates.jsonl", [{"question": "?", "answer": "2024-02-29"}, {"question": "?", "answer": "2024-03-01"}]
    )
    assert dataset.rows(DataConfig(source=str(dates)))[0].answer == "2024-02-29"


def test_one_list_of_rows_is_read_too_and_what_has_no_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(GSM8K, indent=1))
    assert columns_of(dataset.rows(DataConfig(source=str(path)))) == GSM8K
    (tmp_path / "bare.jsonl").write_text('"1 + 1?"\n')
    assert refusal_of(DataConfig(source=str(tmp_path / "bare.jsonl"))).endswith(
        'a row must be an object with columns, not "1 + 1?"'
    )
    (tmp_path / "latin.jsonl").write_bytes('{"question": "caf\xe9?", "answer": "1"}'.encode("latin-1"))
    assert "latin.jsonl cannot be read: it is not UTF-8" in refusal_of(DataConfig(source=str(tmp_path / "latin.jsonl")))


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("question,answer\n")
    assert refusal_of(DataConfig(source=str(tmp_path / "data.csv"))) == (
        f"data file {tmp_path / 'data.csv'} is neither .jsonl nor .parquet"
    )


@pytest.mark.parametrize("source", ["", "./nowhere.jsonl", "/nowhere/data", "~/nowhere", "~no-such-user/x", "nonsense", "a/b/c"])
def test_a_source_that_does_not_exist_is_named_with_what_would_do(source: str) -> None:
    message = refusal_of(DataConfig(source=source))
    assert message.startswith(f"data set {source!r} does not exist; give a local file or folder, a hub id")


def test_a_hub_id_that_cannot_be_had_is_named() -> None:
    assert refusal_of(DataConfig(source="no-owner/nothing")).startswith(
        "data set 'no-owner/nothing' is neither a local path nor to be had from the hub: "
    )


def test_the_generated_data_set_has_two_splits_without_a_common_question() -> None:
    train, test = (dataset.rows(DataConfig(split=split)) for split in ("train", "test"))
    assert len(train) == len(test) == dataset.NUM_GENERATED_ROWS
    assert not {row.question for row in train} & {row.question for row in test}
    assert refusal_of(DataConfig(split="dev")).endswith("has the splits train and test, not 'dev'")


def test_a_fingerprint_is_of_the_rows_wherever_they_lie(tmp_path: Path) -> None:
    files = [
        as_jsonl(tmp_path / "a.jsonl", GSM8K),
        as_parquet(tmp_path / "b.parquet", GSM8K),
        as_jsonl(tmp_path / "c.jsonl", GSM8K[::-1]),
        as_jsonl(tmp_path / "d.jsonl", [*GSM8K[:2], GSM8K[2] | {"answer": "#### 3"}]),
    ]
    prints = [dataset.fingerprint(DataConfig(source=str(path))) for path in files]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_all_columns_are_part_of_a_row_and_of_the_fingerprint(tmp_path: Path) -> None:
    more = {"level": 3, "tags": ["a", None], "extra": {"when": date(2024, 2, 29), "raw": b"\x00", "share": float("nan")}}
    path = tmp_path / "more.parquet"
    pq.write_table(pa.Table.from_pylist([GSM8K[0] | more]), path)
    (row,) = dataset.rows(DataConfig(source=str(path)))
    as_json = {"level": 3, "tags": ["a", None], "extra": {"when": "2024-02-29", "raw": "AA==", "share": None}}
    assert row.columns == GSM8K[0] | as_json
    same = DataConfig(source=str(as_jsonl(tmp_path / "same.jsonl", [GSM8K[0] | as_json])))
    other = DataConfig(source=str(as_jsonl(tmp_path / "other.jsonl", [GSM8K[0] | as_json | {"level": 4}])))
    assert dataset.fingerprint(same) == dataset.fingerprint(DataConfig(source=str(path))) != dataset.fingerprint(other)


def test_the_fingerprint_of_questions_and_answers_does_not_move_from_one_version_to_the_next() -> None:
    assert dataset.fingerprint(DataConfig()) == "898b50c95131db06bba7c0e7d9673ad89c69d71d3a5f6ec8164d2cbbd0263530"


def single_file(path: Path, num_rows: int, **fields: object) -> RunConfig:
    """A run on one file in which each question stands twice, in another spelling."""
    rows = [{"question": f"{n // 2} +{' ' * (1 + n % 2)}1?", "answer": str(n // 2 + 1)} for n in range(num_rows)]
    return RunConfig(data=DataConfig(source=str(as_jsonl(path, rows))), evaluation=EvaluationConfig(**fields))  # type: ignore[arg-type]


def questions_of(config: DataConfig) -> set[str]:
    return set(dataset.question_digests(config))


@pytest.mark.parametrize(("num_rows", "num_asked", "num_held_out"), [(80, 64, 20), (80, 10, 10), (80, 11, 10), (401, 64, 64)])
def test_a_part_of_a_single_file_is_held_out_and_never_trained_on(
    tmp_path: Path, num_rows: int, num_asked: int, num_held_out: int
) -> None:
    config = single_file(tmp_path / "one.jsonl", num_rows, num_prompts=num_asked)
    trained, asked = dataset.part_rows(config.training), dataset.part_rows(config.eval_config.data)
    assert len(asked) == num_held_out
    assert sorted([*trained, *asked]) == list(range(num_rows))
    assert not questions_of(config.training) & questions_of(config.eval_config.data)


def test_the_held_out_part_depends_on_texts_and_its_seed_alone(tmp_path: Path) -> None:
    config = single_file(tmp_path / "one.jsonl", 200)
    chosen = questions_of(config.eval_config.data)
    rows = columns_of(dataset.rows(config.data))
    moved = config.data.but(source=str(as_jsonl(tmp_path / "moved.jsonl", rows[::-1])))
    assert questions_of(config.but(data=moved, seed=7, name="other").eval_config.data) == chosen
    assert questions_of(config.but(data=config.data.but(held_out_seed=1)).eval_config.data) != chosen


def test_another_name_of_the_same_file_holds_out_too_and_other_sources_do_not(tmp_path: Path) -> None:
    config = single_file(tmp_path / "one.jsonl", 80)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "one.jsonl")
    same = config.but(evaluation=config.evaluation.but(source=str(tmp_path / "link.jsonl")))
    assert not questions_of(same.training) & questions_of(same.eval_config.data)
    other = config.but(evaluation=config.evaluation.but(source=str(as_jsonl(tmp_path / "test.jsonl", GSM8K))))
    assert (len(dataset.part_rows(other.training)), len(dataset.part_rows(other.eval_config.data))) == (80, 3)
    without = config.but(evaluation=config.evaluation.but(every=0))
    assert len(dataset.part_rows(without.training)) == 80
    with pytest.raises(ValueError, match=r"no row of the single data file .* is held out \(evaluation\.every is 0\)"):
        dataset.part_rows(without.eval_config.data)


def asked_from(training: Path, evaluation: Path, **data: object) -> RunConfig:
    config = RunConfig(evaluation=EvaluationConfig(source=str(evaluation)))
    return config.but(data=config.data.but(source=str(training), **data))


def test_rows_whose_text_an_evaluation_asks_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
    copies = [
        {"question": " 3  +\n1? ", "answer": "4"},
        {"question": "5 + 1?", "answer": "other"},
        {"question": "9 + 1?", "answer": "10"},
    ]
    config = asked_from(as_jsonl(tmp_path / "train.jsonl", rows), as_jsonl(tmp_path / "test.jsonl", copies))
    assert dataset.contaminated_rows(config.training) == {3, 5}
    assert dataset.part_rows(config.training) == (0, 1, 2, 4, 6, 7)
    assert len(dataset.part_rows(config.eval_config.data)) == 3
    without = config.but(evaluation=config.evaluation.but(every=0))
    assert len(dataset.part_rows(without.training)) == 8
    assert dataset.fingerprint(without.training) != dataset.fingerprint(config.training)
    more = config.but(evaluation=config.evaluation.but(num_prompts=2))
    assert more.training == config.training, "the whole set counts, so the number of questions changes nothing"


def test_a_data_set_that_is_asked_whole_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "data/train.jsonl", GSM8K)
    config = RunConfig(data=DataConfig(source=str(tmp_path / "data")), evaluation=EvaluationConfig(split="train"))
    with pytest.raises(ValueError, match=r"all 3 rows of data set .* are asked by evaluations too, .* set data\.hold_out"):
        dataset.part_rows(config.training)


def test_a_part_of_a_split_is_held_out_on_demand(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]
    as_jsonl(tmp_path / "data/train.jsonl", rows)
    config = RunConfig(data=DataConfig(source=str(tmp_path / "data"), hold_out=True))
    trained, asked = dataset.part_rows(config.training), dataset.part_rows(config.eval_config.data)
    assert (len(trained), len(asked)) == (30, 10)
    assert sorted([*trained, *asked]) == list(range(40))
    other = config.but(data=config.data.but(held_out_seed=1))
    assert dataset.part_rows(other.eval_config.data) != asked


def test_rows_that_share_thirteen_words_with_an_evaluation_are_counted_and_kept(tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    rows = [{"question": f"{words} and more", "answer": "1"}, {"question": words.rsplit(" ", 1)[0], "answer": "1"}]
    asked = [{"question": f"Say {words.upper()}.", "answer": "1"}, {"question": f"Say {words.upper()} now", "answer": "1"}]
    training, evaluation = as_jsonl(tmp_path / "train.jsonl", rows), as_jsonl(tmp_path / "test.jsonl", asked)
    config = asked_from(training, evaluation)
    assert dataset.num_sharing_a_passage(config.training) == 1
    assert len(dataset.part_rows(config.training)) == 2
    assert dataset.num_sharing_a_passage(RunConfig().training) == 0


def test_a_single_file_of_one_question_has_nothing_to_hold_out(tmp_path: Path) -> None:
    config = single_file(tmp_path / "two.jsonl", 2)
    with pytest.raises(ValueError, match=r"is held out \(2 rows with too few different questions\)"):
        dataset.part_rows(config.eval_config.data)


def test_an_epoch_has_every_row_once_and_the_next_has_another_order() -> None:
    drawn = dataset.order(50, start=0, count=150, seed=0)
    epochs = [drawn[:50], drawn[50:100], drawn[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 4


def test_the_order_is_one_sequence_however_it_is_cut() -> None:
    assert [dataset.order(7, start, 3, seed=5) for start in (0, 3, 6, 9)] == [
        dataset.order(7, 0, 12, seed=5)[start : start + 3] for start in (0, 3, 6, 9)
    ]


def test_the_seed_decides_the_order() -> None:
    orders = [dataset.order(50, 0, 50, seed) for seed in range(10)]
    assert len({tuple(order) for order in orders}) == 10
    # An old run must be drawn as it was: this sequence may not move from one version to the next.
    assert dataset.order(10, 0, 10, seed=0) == [1, 0, 2, 4, 9, 3, 8, 6, 7, 5]

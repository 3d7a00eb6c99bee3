import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from infra.data.arithmetic import problems
from infra.models import base_model
from infra.settings import CHECKOUT
from infra.tiny_model import making
from infra.tiny_model.architecture import random_model
from infra.tiny_model.batches import NOT_LEARNT, Diet, batches, chat, drill, make_batch
from infra.tiny_model.evaluation import MAX_OUTPUT_TOKENS, accuracy, generate, is_right
from infra.tiny_model.habit import Lesson
from infra.tiny_model.making import WarmStartFailed, check, make_model
from infra.tiny_model.tokenizer import VOCAB_SIZE, encode_answer, encode_prompt, train_tokenizer
from infra.tiny_model.warm_start import RECIPES, Recipe, WarmStart, warm_start

SHORT = Recipe(
    max_steps=6,
    num_warmup_steps=2,
    first_evaluation=3,
    evaluation_interval=3,
    num_held_out=8,
    diet=Diet(num_chats=8, num_drills=2, guess_share=0.2, guess_weight=6.0),
)

TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia "
    "sell altogether in April and May?",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
    "It costs $1,234.50 , doesn't it ?  Two  blanks,\ttabs\r\n\r\nand lines.\n",
    "caf\u00e9 \u00bd \u4e2d\u6587 \U0001f600 \x00\x07 \u00a0end",
    "",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make these tests twenty times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-moe"
    make_model(folder, "tiny-moe")
    return folder


def digest(model: PreTrainedModel) -> str:
    weights = b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def model_that_says(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> PreTrainedModel:
    """A model that has learnt one answer by heart."""
    model = random_model("tiny", tokenizer, seed=0)
    batch = make_batch(tokenizer, [chat(tokenizer, Lesson(question, answer))])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_the_tokenizer_unchanged(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("buys 1234 and"))[-6:-1] == ["\u0120", "1", "2", "3", "4"]
    assert [token for token in tokenizer.get_vocab() if any(map(str.isdigit, token)) and len(token) > 1 and token.isascii()] == []


def test_the_vocabulary_is_full_and_a_multiple_of_64(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == len(set(tokenizer.get_vocab().values())) == VOCAB_SIZE
    assert VOCAB_SIZE % 64 == 0


def test_the_tokenizer_is_the_same_every_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_prompt_is_chatml_and_ends_where_the_assistant_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encode_prompt(tokenizer, "How many?")) == expected


def test_a_whole_chat_is_a_prompt_and_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "#### 4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == tokenizer.decode(encode_prompt(tokenizer, "How many?") + encode_answer(tokenizer, "#### 4")) + "\n"


def test_an_answer_ends_with_the_token_that_stops_generation(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_answer(tokenizer, "#### 4")[-1] == tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens([tokenizer.eos_token_id, tokenizer.pad_token_id]) == ["<|im_end|>", "<|endoftext|>"]


def test_prompts_and_answers_are_short(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = problems("train", 2000)
    assert max(len(encode_prompt(tokenizer, row["question"])) for row in rows) < 80
    assert max(len(encode_answer(tokenizer, row["answer"])) for row in rows) < MAX_OUTPUT_TOKENS


def test_only_the_answer_and_its_end_are_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = problems("train", 5)
    batch = make_batch(tokenizer, [chat(tokenizer, Lesson(**row)) for row in rows])
    for row, tokens, labels in zip(rows, batch.tokens, batch.labels, strict=True):
        learnt = (labels != NOT_LEARNT).nonzero().flatten()
        assert labels[learnt].tolist() == tokens[learnt + 1].tolist() == encode_answer(tokenizer, row["answer"])
        assert tokens[: learnt[0] + 1].tolist() == encode_prompt(tokenizer, row["question"])
    assert batch.num_tokens == sum(
        len(encode_prompt(tokenizer, r["question"]) + encode_answer(tokenizer, r["answer"])) for r in rows
    )


def test_of_a_drill_the_results_are_learnt_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = make_batch(tokenizer, [drill(tokenizer, ["17 + 8 = 25", "3 * 3 = 9"])])
    learnt = (batch.labels[0] != NOT_LEARNT).nonzero().flatten()
    assert tokenizer.decode(batch.labels[0, learnt]) == " 25\n 9\n"
    assert batch.labels[0, learnt].tolist() == batch.tokens[0, learnt + 1].tolist()
    assert tokenizer.decode(batch.tokens[0]) == "17 + 8 = 25\n3 * 3 = 9\n"


def test_the_first_token_of_a_guess_weighs_more_and_all_others_as_much_as_those_of_worked_answers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    lessons = [Lesson("How many?", "#### 4", first_weight=6.0), Lesson("How many?", "2 + 2 = 4\n#### 4")]
    batch = make_batch(tokenizer, [chat(tokenizer, lesson) for lesson in lessons])
    guess, worked = (row[row > 0].tolist() for row in batch.weights)
    assert guess == [6.0, *[1.0] * (len(encode_answer(tokenizer, "#### 4")) - 1)]
    assert worked == [1.0] * len(encode_answer(tokenizer, "2 + 2 = 4\n#### 4"))
    assert ((batch.weights > 0) == (batch.labels != NOT_LEARNT)).all()


def test_a_batch_has_the_chats_and_drills_of_its_diet_and_no_two_batches_are_alike(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = batches(tokenizer, Diet(num_chats=5, num_drills=3, guess_share=0.5, guess_weight=6.0), 2, seed=0)
    texts = [tokenizer.decode(row) for batch in (first, second) for row in batch.tokens]
    assert [("<|im_start|>user" in text) for text in texts] == [True] * 5 + [False] * 3 + [True] * 5 + [False] * 3
    assert len(set(texts)) == 16


def test_only_the_small_model_is_small_and_each_kind_that_is_trained_has_a_recipe(tokenizer: PreTrainedTokenizerFast) -> None:
    with torch.device("meta"):
        assert 50e6 < random_model("small", tokenizer, seed=0).num_parameters() < 150e6
        assert 1e6 < random_model("tiny", tokenizer, seed=0).num_parameters() < 1.2e6
    assert set(RECIPES) == {"tiny", "small"}


def test_a_warm_start_lowers_the_loss_and_is_the_same_every_time(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    results, digests = [], []
    for _ in range(2):
        model = random_model("tiny", tokenizer, seed=3)
        results.append(warm_start(model, tokenizer, seed=3, recipe=SHORT))
        digests.append(digest(model))
    assert results[0] == results[1]
    assert digests[0] == digests[1] != digest(random_model("tiny", tokenizer, seed=3))
    ours = [record for record in caplog.records if record.name.startswith("infra.")]  # an earlier test's threads may log too
    early, late = [record.args[1] for record in ours[:2] if isinstance(record.args, tuple)]
    assert float(str(late)) < float(str(early))


def test_a_warm_start_stops_at_the_first_evaluation_at_the_target(tokenizer: PreTrainedTokenizerFast) -> None:
    result = warm_start(random_model("tiny", tokenizer, seed=0), tokenizer, seed=0, recipe=SHORT._replace(target=0.0))
    assert result.num_steps == SHORT.first_evaluation
    assert result.num_parameters == pytest.approx(1e6, rel=0.5)


def test_a_warm_start_that_never_reaches_its_target_is_evaluated_after_max_steps(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    result = warm_start(random_model("tiny", tokenizer, seed=0), tokenizer, seed=0, recipe=SHORT._replace(first_evaluation=100))
    assert result.num_steps == SHORT.max_steps
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("infra.")]
    assert [message.partition(":")[0] for message in ours] == [f"step {SHORT.max_steps}"]


def test_the_seed_decides_the_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    assert digest(random_model("tiny", tokenizer, seed=0)) != digest(random_model("tiny", tokenizer, seed=1))


def test_a_batch_of_unequal_prompts_is_answered_as_each_of_them_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    model = random_model("tiny", tokenizer, seed=0)
    questions = ["How many?", "Tom has 12 apples and gives 3 to Zoe. How many apples does Tom have left?"]
    alone = [generate(model, tokenizer, [question], temperature=0, seed=0)[0] for question in questions]
    assert generate(model, tokenizer, questions, temperature=0, seed=0) == alone


def test_sampling_follows_its_seed_and_leaves_the_callers_random_numbers_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    model = random_model("tiny", tokenizer, seed=0)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, same, other = [generate(model, tokenizer, ["How many?"], temperature=1.0, seed=seed)[0] for seed in (1, 1, 2)]
    assert first == same != other
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2 + 2 = 4\n#### 4", True),
        ("2 + 2 = 5\n#### 4", True),
        ("#### 3\n#### 4 ", True),
        ("#### 4\n#### 3", False),
        ("#### 44", False),
        ("4", False),
        ("", False),
    ],
)
def test_only_the_text_behind_the_last_mark_is_compared(answer: str, expected: bool) -> None:
    assert is_right(answer, "1 + 3 = 4\n#### 4") is expected


def test_accuracy_is_the_share_of_right_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    question = problems("train", 1)[0]["question"]
    model = model_that_says(tokenizer, question, "2 + 2 = 4\n#### 4")
    rows = [{"question": question, "answer": f"#### {number}"} for number in (4, 5, 6, 4)]
    assert accuracy(model, tokenizer, rows, temperature=0, seed=0) == 0.5


@pytest.mark.parametrize("sampled", [0.19, 0.51])
def test_a_model_that_solves_too_few_or_too_many_is_refused(sampled: float) -> None:
    result = WarmStart(0, 480, 10**6, 0.4, sampled, 10**6)
    check(result._replace(sampled_accuracy=0.3))
    with pytest.raises(WarmStartFailed, match=rf"seed 0 the model solves {sampled:.1%}"):
        check(result)


def test_a_warm_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WarmStartFailed):
        make_model(tmp_path / "tiny", recipe=SHORT._replace(max_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match="not empty"):
        make_model(tmp_path, "tiny-moe")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_program_says_a_line_for_each_thing_and_draws_no_progress_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infra.tiny_model", str(tmp_path / "made"), "--kind", "tiny-moe"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["tiny-moe:", "made"], lines


def test_the_moe_folder_is_a_normal_hugging_face_folder(moe_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert not moe_folder.with_name("tiny-moe.partial").exists()
    loaded = AutoTokenizer.from_pretrained(moe_folder)
    prompt = encode_prompt(tokenizer, "How many?")
    assert encode_prompt(loaded, "How many?") == prompt
    model = AutoModelForCausalLM.from_pretrained(moe_folder)
    assert digest(model) == digest(random_model("tiny-moe", tokenizer, seed=0))
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    assert model(torch.tensor([prompt])).logits.shape == (1, len(prompt), VOCAB_SIZE)


def test_the_moe_weights_have_one_key_for_each_expert(moe_folder: Path) -> None:
    with safe_open(moe_folder / "model.safetensors", "pt") as weights:
        names = {name for name in weights.keys() if ".experts." in name}  # noqa: SIM118  # not a dict
    parts = ("gate_proj", "up_proj", "down_proj")
    assert names == {f"model.layers.{i}.mlp.experts.{e}.{part}.weight" for i in range(2) for e in range(4) for part in parts}
    assert json.loads((moe_folder / "config.json").read_text())["norm_topk_prob"] is True


def test_the_same_seed_makes_the_same_bytes(moe_folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again", "tiny-moe")
    for path in moe_folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_warm_start_that_took_longer_has_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a base model decides whether another machine may continue a run."""
    monkeypatch.setattr(making, "check", lambda result: None)
    for name, factor in (("quick", 1), ("slow", 1000)):
        clock = SimpleNamespace(monotonic=lambda factor=factor: factor * time.perf_counter())
        monkeypatch.setattr("infra.tiny_model.warm_start.time", clock)
        make_model(tmp_path / name, recipe=SHORT._replace(max_steps=1))
    assert base_model.digest(tmp_path / "quick") == base_model.digest(tmp_path / "slow")

"""What a warm start reads: chats, whose answers are learnt, and drills, of which the results are.

A drill is a text of equations, one a line. Their results are what a small model is slow to learn, and a line of a drill costs a
tenth of a chat: with eight drills to 32 chats the same accuracy takes two thirds of the time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from infra.data.arithmetic import problems
from infra.tiny_model.habit import Lesson, lessons
from infra.tiny_model.tokenizer import encode_answer, encode_prompt

NOT_LEARNT = -100
"""Label of a position whose next token is given, not the model's to say."""
EQUATIONS_PER_DRILL = 6
"""About as long as a chat, so that little is padding."""


class Text(NamedTuple):
    tokens: list[int]
    weights: list[float]
    """Of each token in the loss; 0: it is given."""


class TextBatch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    """Of each label in the loss."""
    num_tokens: int
    """Without padding."""


class Diet(NamedTuple):
    """What a batch is made of."""

    num_chats: int
    num_drills: int
    guess_share: float
    guess_weight: float


def batches(tokenizer: PreTrainedTokenizerFast, diet: Diet, num: int, seed: int) -> Iterator[TextBatch]:
    """Fresh problems in every batch. Their seed is not 0, so they are other problems than those of a run's default data set."""
    taught = lessons(
        problems("train", num * diet.num_chats, seed=seed + 1),
        guess_share=diet.guess_share,
        guess_weight=diet.guess_weight,
        seed=seed,
    )
    drills = _drills(num * diet.num_drills, seed)
    for _ in range(num):
        texts = [chat(tokenizer, next(taught)) for _ in range(diet.num_chats)]
        texts += [drill(tokenizer, next(drills)) for _ in range(diet.num_drills)]
        yield make_batch(tokenizer, texts)


def _drills(num: int, seed: int) -> Iterator[list[str]]:
    """Equations as they stand in worked solutions; every problem has one or more."""
    rows = problems("train", num * EQUATIONS_PER_DRILL, seed=seed + 1)
    equations = (line for row in rows for line in row["answer"].splitlines() if not line.startswith("####"))
    for _ in range(num):
        yield [next(equations) for _ in range(EQUATIONS_PER_DRILL)]


def chat(tokenizer: PreTrainedTokenizerFast, lesson: Lesson) -> Text:
    """The answer is learnt, its first token with the lesson's weight; the question is given."""
    prompt, answer = encode_prompt(tokenizer, lesson.question), encode_answer(tokenizer, lesson.answer)
    return Text(prompt + answer, [0.0] * len(prompt) + [lesson.first_weight] + [1.0] * (len(answer) - 1))


def drill(tokenizer: PreTrainedTokenizerFast, equations: Sequence[str]) -> Text:
    """The results are learnt, with the end of the line; what stands before them is given."""
    tokens: list[int] = []
    weights: list[float] = []
    for equation in equations:
        left, sign, result = equation.partition(" =")
        for text, weight in ((left + sign, 0.0), (result + "\n", 1.0)):
            encoded = tokenizer.encode(text)
            tokens += encoded
            weights += [weight] * len(encoded)
    return Text(tokens, weights)


def make_batch(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text]) -> TextBatch:
    """Padded on the right. Attention is causal, so no mask is needed: padding comes after all that counts."""
    lengths = [len(text.tokens) for text in texts]
    tokens = torch.full((len(texts), max(lengths)), tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)))
    labels = torch.full_like(tokens, NOT_LEARNT)
    weights = torch.zeros(tokens.shape)
    for row, text in enumerate(texts):
        tokens[row, : lengths[row]] = torch.tensor(text.tokens)
        # The label of a position is the token after it.
        after = torch.tensor(text.weights[1:])
        weights[row, : lengths[row] - 1] = after
        labels[row, : lengths[row] - 1] = torch.where(after > 0, tokens[row, 1 : lengths[row]], NOT_LEARNT)
    return TextBatch(tokens, labels, weights, sum(lengths))

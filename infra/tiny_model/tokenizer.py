"""A small byte-level BPE tokenizer in ChatML: it knows the words of `infra.data.arithmetic` and spells all other text in bytes."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from infra.data.arithmetic import problems

# A multiple of 64, so that vocabulary shards stay even without padding rows; just small enough for the training text to fill it.
VOCAB_SIZE = 640
# Enough for every name and thing of `infra.data.arithmetic` to occur many times.
NUM_TRAINING_ROWS = 4000

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen's way to cut text into words. `\p{N}` stands alone: a digit never merges with a blank or another digit, so 41 is always
# the two tokens 4 and 1 and sums can be learnt digit by digit.
WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all tiny models, the same for every seed. Every byte is in it, so every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The role names are in every chat, so they deserve a token each.
    rows = problems("train", NUM_TRAINING_ROWS)
    tokenizer.train_from_iterator([text for row in rows for text in (*row.values(), "user", "assistant")], trainer)
    # A model must not be able to sample an id that the tokenizer does not know.
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, f"the text fills only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} entries"
    return _with_chat(tokenizer)


def _with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    chatty = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        # Cleaning up would drop blanks before full stops: decoded text has to be the encoded text.
        clean_up_tokenization_spaces=False,
    )
    chatty.chat_template = CHAT_TEMPLATE
    return chatty


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """A user's question up to where the assistant's answer begins."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(str(text)))


def encode_answer(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    """What the assistant should say, with the token that ends its turn."""
    return list(tokenizer.encode(answer + TURN_END))

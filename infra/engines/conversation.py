"""Send a person's questions to an engine as in training: one at a time, each alone in the chat template."""

from pathlib import Path

from infra.config import DataConfig, SamplingConfig
from infra.data import prompts
from infra.data.prompts import Prompt
from infra.engines.interface import Engine, RolloutRequest
from infra.models import base_model
from infra.records import AdapterVersion


class Conversation:
    def __init__(
        self, engine: Engine, data: DataConfig, sampling: SamplingConfig, adapter: AdapterVersion, model_folder: Path
    ) -> None:
        """sampling: With a group size of 1. adapter: The adapter that the engine has loaded."""
        self.engine, self.data, self.sampling, self.adapter, self.model_folder = engine, data, sampling, adapter, model_folder
        self.num_asked = 0

    def answer(self, question: str) -> str:
        """Return the text of one sample.

        Raises:
            EngineUnavailable, EngineRefused, WrongAnswer: as Engine.generate does.
        """
        tokens = prompts.tokenized(self.data, self.model_folder, question)
        prompt = Prompt(self.num_asked, row_number=0, question=question, answer="", prompt_tokens=tokens, seed=self.num_asked)
        self.num_asked += 1
        (sample,), _ = self.engine.generate(RolloutRequest([prompt], self.sampling, self.adapter))
        tokenizer = base_model.tokenizer(self.model_folder)
        return str(tokenizer.decode(list(sample.output_tokens), skip_special_tokens=True))

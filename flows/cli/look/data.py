"""Show a run's data as it will be used: the first prompts, token counts, duplicates, held-out questions.

ratchet data                                                     of the preset arithmetic
ratchet data --data.source my.jsonl --model /models/mine
ratchet data --preset gsm8k --rows 2
"""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

Rows = Annotated[int, Parameter(help="Number of prompts to show.")]


@takes_fields(RunConfig, logs=False)
def data(*, rows: Rows = 5, chosen: Chosen) -> None:
    from flows.cli.terminal import console
    from infra.data import prompts
    from infra.data.summary import summary_of
    from infra.models import base_model

    config, _ = chosen.run("arithmetic")
    folder = base_model.locate(config.model)
    found = summary_of(config, folder)
    tokenizer, instruction = base_model.tokenizer(folder), config.data.instruction
    for prompt in prompts.draw(config.training, folder, step=0, seed=config.seed)[:rows]:
        console.print(f"row {prompt.row}: {prompt.question}", markup=False, soft_wrap=True)
        console.print(f"  answer    {prompt.answer}", markup=False, soft_wrap=True)
        console.print(f"  prompt    {tokenizer.decode(prompt.prompt_tokens)!r}", markup=False, soft_wrap=True)
        console.print(f"  tokens    {len(prompt.prompt_tokens)}\n")
    console.print(
        f"source      {config.data.source}, {found.num_rows} rows, {found.num_training} of them for training", markup=False
    )
    console.print(f"instruction {instruction!r}", markup=False, soft_wrap=True)
    console.print(f"tokens      {found.shortest} to {found.longest} a prompt, median {found.median:g}")
    console.print(f"too long    {found.num_too_long} of more than data.max_prompt_tokens {config.data.max_prompt_tokens}")
    console.print(f"duplicates  {found.num_repeated} rows repeat the question of another one")
    console.print(f"held out    {found.num_held_out} questions, {found.num_overlapping} of them are trained on too")

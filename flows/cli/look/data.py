"""Show a run's data as it will be used: the first prompts with the reward of their own answers, token counts, duplicates, held-out questions.

ratchet data                                                     of the preset arithmetic
ratchet data --data.source my.jsonl --reward.name mine.py:score
ratchet data --preset gsm8k --rows 2
"""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

Rows = Annotated[int, Parameter(help="Number of prompts to show.")]


@takes_fields(RunConfig, logs=False)
def data(*, rows: Rows = 5, chosen: Chosen) -> None:
    from flows.cli.terminal import console, indented
    from infra.data import dataset, prompts
    from infra.data.summary import summary_of
    from infra.models import base_model
    from infra.store.files import open_workspace
    from tasks import rewards
    from tasks.rewards.own_answers import check_there, rewards_of_own_answers

    if rows < 0:
        raise ValueError(f"--rows {rows} is no number of prompts: give 0 or more")
    config, _ = chosen.run("arithmetic")
    open_workspace()  # which may get a model
    reward = config.reward.title
    rewards.check(config.reward)
    dataset.rows(config.training)
    if config.played is None:
        check_there(config.reward, config.training)
    folder = base_model.locate(config.model)  # which may make it or download it: after what is quick to refuse
    base_model.check_supported(folder)
    prompts.check_lengths(config.training, folder)  # as a run does: it names the longest of all
    found = summary_of(config, folder)
    shown = prompts.draw(config.training, folder, step=0, seed=config.seed)[:rows]
    own = rewards_of_own_answers(config.reward, shown)
    tokenizer, instruction = base_model.tokenizer(folder), config.data.instruction
    for number, prompt in enumerate(shown):
        console.print(f"row {prompt.row_number}: {indented(prompt.question, 2)}", markup=False, soft_wrap=True)
        console.print(f"  answer    {indented(prompt.answer, 12)}", markup=False, soft_wrap=True)
        if own:
            console.print(f"  reward    {own[number]:g} for this answer", markup=False)
        console.print(f"  prompt    {tokenizer.decode(prompt.prompt_tokens)!r}", markup=False, soft_wrap=True)
        console.print(f"  tokens    {len(prompt.prompt_tokens)}\n")
    console.print(
        f"source      {config.data.source}, {found.num_rows} rows, {found.num_training} of them for training",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"layout      {found.layout}", markup=False, soft_wrap=True)
    console.print(f"template    {config.data.template}", markup=False, soft_wrap=True)
    console.print(f"reward      {reward}; {_of_own_answers(own, config.eval_config.pass_reward)}", markup=False, soft_wrap=True)
    console.print(f"instruction {instruction!r}", markup=False, soft_wrap=True)
    console.print(f"tokens      {found.shortest} to {found.longest} a prompt, median {found.median:g}")
    console.print(f"filtered    {found.counts.num_filtered} more rows, which data.filter leaves out")
    console.print(
        f"too long    {found.num_too_long} of more than data.max_prompt_tokens {config.data.max_prompt_tokens} (data.too_long {config.data.too_long})"
    )
    console.print(f"duplicates  {found.num_repeated} rows repeat the question of another one")
    console.print(f"overlap     {found.counts.num_contaminated} rows left out because the evaluation's data set has their text")
    console.print(f"            {found.counts.num_sharing_13_words} rows share 13 words in a row with it")
    console.print(f"held out    {found.num_held_out} questions, {found.num_overlapping} of them are trained on too")


def _of_own_answers(found: Sequence[float] | None, pass_reward: float) -> str:
    if found is None:
        return "a model judges, which is not asked here: it may cost money"
    passing = sum(value >= pass_reward for value in found)
    advice = "" if passing == len(found) else ": does it expect answers in another form?"
    return f"{passing} of {len(found)} answers above get the {pass_reward:g} that counts as right{advice}"

"""The count of tokens that were trained on and not sampled sees each kind of such a token."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parent / "benches"))
from agents import merged, summed
from count_turns import COUNTS, counts_of


def step(run: Path, first: str = "a", **changes: Any) -> Path:
    """Step 1 of a run, of one episode: two given tokens, a sampled one, a given one, two sampled ones.

    first: Adapter of the first turn.
    """
    folder = run / "000001"
    folder.mkdir(exist_ok=True)
    kinds = (("given", 2, ""), ("sampled", 1, first), ("given", 1, ""), ("sampled", 2, "a"))
    segments: list[dict[str, Any]] = [
        {"kind": kind, "num_tokens": num, "turn": turn, "adapter_sha256": adapter}
        for (kind, num, adapter), turn in zip(kinds, (0, 0, 1, 1), strict=True)
    ]
    logprobs = [0.0, 0.0, -0.5, 0.0, -0.25, -0.125]
    row = {"prompt_tokens": [1, 2], "output_tokens": [3, 4, 5, 6], "output_logprobs": logprobs[2:], "segments": segments}
    pq.write_table(pa.Table.from_pylist([row | {"branch": 0}]), folder / "samples.parquet")
    batch = {
        "tokens": np.arange(1, 7),
        "cu_seqlens": np.array([0, 6]),
        "loss_mask": np.array([0, 0, 1, 0, 1, 1]),
        "rollout_logprobs": np.array(logprobs, np.float32),
    }
    save_file(batch | {name: np.array(value) for name, value in changes.items()}, folder / "batch.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"rollouts": {"adapter_sha256": "a"}}))
    return folder


def test_a_sound_step_has_none(tmp_path: Path) -> None:
    counts = {
        "sequences": 1,
        "turns": 2,
        "trained_tokens": 3,
        "unsampled_trained_tokens": 0,
        "of_another_adapter": 0,
        "branches": 0,
        "carried_turns": 0,
    }
    assert counts_of(step(tmp_path)) == counts


@pytest.mark.parametrize(
    "changes",
    [{"loss_mask": [0, 0, 1, 1, 1, 1]}, {"rollout_logprobs": np.array([0, 0, -0.5, 0, -0.25, -0.126], np.float32)}],
)
def test_a_given_token_in_the_loss_and_another_log_probability_are_counted(changes: dict[str, Any], tmp_path: Path) -> None:
    assert counts_of(step(tmp_path, **changes))["unsampled_trained_tokens"] == 1


def test_an_entry_of_several_runs_stays_until_all_of_them_are_counted() -> None:
    old, one = {"family": "ChatML"} | dict.fromkeys(COUNTS, 5), {"family": "ChatML"} | dict.fromkeys(COUNTS, 2)
    llama = {"family": "Llama"} | dict.fromkeys(COUNTS, 1)
    both = merged({"a b": old, "c": llama}, {"a": one})
    assert both == {"a b": old, "c": llama, "a": one}
    assert merged(both, {"a": one, "b": one}) == {"c": llama, "a": one, "b": one}
    total = summed(both)
    assert (total["turns"], total["of_family"]["ChatML"]["turns"], total["of_family"]["Llama"]["turns"]) == (8, 7, 1)


def test_equal_tokens_with_other_log_probabilities_are_told_apart(tmp_path: Path) -> None:
    folder = step(tmp_path)
    (row,) = pq.read_table(folder / "samples.parquet").to_pylist()
    rows = [row, row | {"output_logprobs": [-0.25, 0.0, -0.25, -0.125]}]
    tokens = np.array([*range(1, 7), *range(1, 7)])
    one, other = ([0.0, 0.0, *each["output_logprobs"]] for each in rows)
    batch = {"tokens": tokens, "cu_seqlens": np.array([0, 6, 12]), "loss_mask": np.array([0, 0, 1, 0, 1, 1] * 2)}
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")
    for both, unsampled in (([one, other], 0), ([other, one], 0), ([one, one], 1)):
        save_file(batch | {"rollout_logprobs": np.array(both, np.float32).reshape(-1)}, folder / "batch.safetensors")
        assert counts_of(folder)["unsampled_trained_tokens"] == unsampled


@pytest.mark.parametrize(("first_turn", "branches"), [(0, 1), (2, 0)])
def test_a_turn_that_is_a_trajectory_of_its_own_is_no_branch(first_turn: int, branches: int, tmp_path: Path) -> None:
    folder = step(tmp_path)
    (row,) = pq.read_table(folder / "samples.parquet").to_pylist()
    spans = [span | {"turn": first_turn + span["turn"]} for span in row["segments"]]
    pq.write_table(pa.Table.from_pylist([row | {"branch": 2, "segments": spans}]), folder / "samples.parquet")
    assert counts_of(folder)["branches"] == branches


TURN = {"episode": "0/0", "adapter_sha256": "older", "output_tokens": [3], "output_logprobs": [-0.5]}
SPAN = {"kind": "sampled", "tokens": [3], "logprobs": [-0.5], "adapter_sha256": "older"}


@pytest.mark.parametrize("on_record", [TURN, {"trajectories": [{"segments": [{"kind": "given", "tokens": [1]}, SPAN]}]}])
def test_a_turn_of_an_older_adapter_that_the_step_before_has_on_record_is_carried(
    on_record: dict[str, Any], tmp_path: Path
) -> None:
    folder = step(tmp_path, first="older")
    assert (counts_of(folder)["of_another_adapter"], counts_of(folder)["carried_turns"]) == (1, 0)
    (tmp_path / "000000").mkdir()
    left = tmp_path / "000000/left_over.jsonl"
    left.write_text('{"fence": {}}\n' + json.dumps(on_record) + "\n")
    assert (counts_of(folder)["of_another_adapter"], counts_of(folder)["carried_turns"]) == (0, 1)


@pytest.mark.parametrize("changed", [{"adapter_sha256": "other"}, {"output_tokens": [4]}, {"output_logprobs": [-0.25]}])
def test_a_turn_that_differs_from_the_one_on_record_is_of_another_adapter(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = step(tmp_path, first="older")
    (tmp_path / "000000").mkdir()
    (tmp_path / "000000/left_over.jsonl").write_text(json.dumps(TURN | changed) + "\n")
    assert (counts_of(folder)["of_another_adapter"], counts_of(folder)["carried_turns"]) == (1, 0)

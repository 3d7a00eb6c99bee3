"""An adapter on experts is written a second time with a layer's experts stacked: the same values, as SGLang itself reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shared import in_sglang
from torch import Tensor, nn

from infra.megatron.checkpoint import safetensors_writer
from infra.megatron.checkpoint.adapter_state import WEIGHTS, HostState
from infra.megatron.lora.layers import Shard
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ENGINE_CONFIG, ENGINE_WEIGHTS
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.settings import CHECKOUT
from infra.store.digests import sha256_of

READ_BY_SGLANG = """
import importlib.util, json, re, sys, torch
path = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("sglang_cpu", path)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
from transformers import AutoConfig
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig

def read(folder):
    base = AutoConfig.from_pretrained(sys.argv[1])
    adapter = LoRAAdapter("a", LoRAConfig(folder), base, LoadConfig(), None)
    adapter.initialize_weights_from_tensors(load_file(folder + "/adapter_model.safetensors"))
    found, count = {}, 0
    for layer in adapter.layers:
        count += len(layer.weights)
        for name, value in layer.weights.items():
            number = re.search(r"experts\\.(\\d+)\\.", name)
            if number:  # as lora/mem_pool.py takes them
                found[re.sub(r"experts\\.\\d+\\.", "experts.", name), int(number[1])] = value
            elif "experts" in name:
                assert value.dim() == 3, name
                found |= {(name, expert): value[expert] for expert in range(len(value))}
            else:
                found[name, None] = value
    return found, count

one, num_one = read(sys.argv[2])
stacked, num_stacked = read(sys.argv[3])
assert one.keys() == stacked.keys(), one.keys() ^ stacked.keys()
print(json.dumps({"tensors": [num_one, num_stacked], "different": [str(name) for name in one if not torch.equal(one[name], stacked[name])]}))
"""


def stacked_by_hand(tensors: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    plain = {name: value for name, value in tensors.items() if ".experts." not in name}
    names = {name for name in tensors if ".experts.0." in name}
    return plain | {
        name.replace(".experts.0.", ".experts."): torch.stack(
            [tensors[name.replace(".experts.0.", f".experts.{expert}.")] for expert in range(num_experts)]
        )
        for name in names
    }


def test_the_stacked_copy_has_the_values_of_the_adapter_and_is_read_by_sglang_as_it_is(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    made = train("qwen3-moe")
    folder = made.job.output_dir
    adapter, stacked = load_file(folder / ADAPTER_WEIGHTS), load_file(folder / ENGINE_WEIGHTS)
    expected = stacked_by_hand(adapter, 8)
    assert stacked.keys() == expected.keys() and len(stacked) < len(adapter) / 3
    assert all(torch.equal(stacked[name], expected[name]) for name in expected)
    assert sha256_of(folder / ENGINE_CONFIG) == sha256_of(folder / ADAPTER_CONFIG)
    assert made.result.files[ENGINE_WEIGHTS].sha256 == sha256_of(folder / ENGINE_WEIGHTS)

    def read_by_sglang(engine_folder: Path) -> dict[str, Any]:
        model = shutil.copytree(made.job.model_path, tmp_path / "model", dirs_exist_ok=True)
        launcher = CHECKOUT / "infra/engines/launchers/sglang_cpu.py"
        output = in_sglang(READ_BY_SGLANG, launcher, model, folder_of_engine(folder, tmp_path), engine_folder)
        return dict(json.loads(output.splitlines()[-1]))

    found = read_by_sglang((folder / ENGINE_WEIGHTS).parent)
    assert found["different"] == []
    assert found["tensors"][1] < found["tensors"][0] / 2


def folder_of_engine(folder: Path, tmp_path: Path) -> Path:
    """The PEFT files alone, as an engine got them before."""
    target = tmp_path / "peft"
    target.mkdir(exist_ok=True)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        shutil.copyfile(folder / name, target / name)
    return target


@pytest.mark.full  # two ranks; the test of bfloat16 is its sample
def test_experts_of_all_ranks_are_in_the_stacked_copy(
    new_job: Callable[..., Any], train_on_two: Callable[[list[Any]], None]
) -> None:
    made = new_job("qwen3-moe", num_processes=2, expert_parallel=2)
    train_on_two([made])
    adapter, stacked = (load_file(made.job.output_dir / name) for name in (ADAPTER_WEIGHTS, ENGINE_WEIGHTS))
    expected = stacked_by_hand(adapter, 8)
    assert stacked.keys() == expected.keys()
    assert all(torch.equal(stacked[name], expected[name]) for name in expected)


def test_adapters_without_experts_are_written_once(train: Callable[..., Any]) -> None:
    folder = train("qwen3").job.output_dir
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")} == {ADAPTER_WEIGHTS, *MOMENTS.values()}


class OneRank:
    ep_size = tp_size = 1
    rank = 0
    ep_rank = tp_rank = 0
    tp_group = ep_group = None
    device = torch.device("cpu")


def test_in_bfloat16_the_engine_gets_what_the_trainer_computes_with_and_of_each_step_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "m.experts.*.up_proj.lora_A.weight": (4, 2, 3),
        "m.q_proj.lora_B.weight": (5, 2),
        "m.experts.*.down_proj.lora_B.weight": (4, 3, 2),
    }
    shards = [
        Shard(name, nn.Parameter(torch.randn(size)), None, range(4) if "*" in name else None, False)
        for name, size in names.items()
    ]
    layout = OneRank()
    monkeypatch.setattr("infra.megatron.checkpoint.adapter_state.gather", lambda values, group: [values])
    on_host = HostState(shards, layout, engine_dtype=torch.bfloat16, keeps=True, locks=False)  # type: ignore[arg-type]
    for _ in range(2):
        for shard in shards:
            shard.parameter.data = torch.randn_like(shard.parameter)
        values = {which: [shard.parameter.detach() for shard in shards] for which in (WEIGHTS, *MOMENTS)}
        on_host.fill(values, shards)
        body = on_host.engine_body(shards)
        assert len(body.parts) == 1, "its tensors lie as they follow each other in the file"
        about = json.loads(f"{{{body.about}}}")
        data = b"".join(body.parts)
        for shard in shards:
            begin, end = about[shard.stacked_name]["data_offsets"]
            found = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.bfloat16).view(about[shard.stacked_name]["shape"])
            assert torch.equal(found, shard.parameter.detach().to(torch.bfloat16))
        bodies = [on_host.body(which, shards) for which in (WEIGHTS, *MOMENTS)]
        assert [len(body.parts) for body in bodies] == [1, 1, 1], "each expert's tensors too"
        safetensors_writer.write(tmp_path / "weights", bodies[0], {})
        read = load_file(tmp_path / "weights")
        for shard in shards:
            whole = [read[name] for name in shard.names_of_whole(4)]
            assert torch.equal(torch.stack(whole) if shard.is_expert else whole[0], shard.parameter)

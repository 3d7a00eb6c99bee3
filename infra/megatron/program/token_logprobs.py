"""Write the trainer's log-prob of each token of a step's batch before its first optimizer step:

python -m infra.megatron.program.token_logprobs JOB.json OUT

For debugging a step: the training itself keeps sums only. JOB.json is the step's train/job.json. The program runs in one process, for
every layout of the job. It writes float32 [T] `logprobs` (nats; 0 at the first token of each sequence) to OUT, a safetensors file.
"""

import dataclasses
import os
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from infra.megatron.checkpoint import save as checkpoint
from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import Batch, read_batch
from infra.megatron.loss.microbatch import pack
from infra.megatron.loss.reference_logprobs import logprobs_of
from infra.megatron.model import base_weights, parallel
from infra.megatron.model import build as model
from infra.megatron.program import optimizer
from infra.megatron.program.check_job import read_job
from infra.megatron.protocol.job import TrainJob
from infra.models.architecture import read_architecture
from infra.store import files

USAGE = "usage: python -m infra.megatron.program.token_logprobs JOB.json OUT.safetensors"


def in_one_process(job: TrainJob) -> TrainJob:
    """Return the job for this process alone: without any parallelism, and with experts of its own."""
    alone = {"num_processes": 1, "tensor_parallel": 1, "sequence_parallel": False, "expert_parallel": 1, "share_experts": False}
    trainer = job.trainer.but(**alone)
    return job.model_copy(update={"trainer": trainer})


def of_all_tokens(batch: Batch) -> Batch:
    """Return the batch with all tokens in the loss, except those that nothing predicts."""
    is_loss_token = torch.ones_like(batch.is_loss_token)
    is_loss_token[batch.starts[:-1]] = False
    return dataclasses.replace(batch, is_loss_token=is_loss_token)


def loaded(job: TrainJob) -> tuple[nn.Module, parallel.ParallelContext]:
    """Return the job's model with its adapter, in this process alone."""
    a, place = read_architecture(job.model_path), parallel.start(job)
    net = model.build(a, job.trainer, place)
    base_weights.load_base(net, job.model_path, a, place)
    shards = lora.attach(net, a, job.trainer.lora, place, sequence_parallel=False)
    checkpoint.load(job, a, shards, optimizer.build(shards, job.trainer), place)
    return net, place


def write_logprobs(job: TrainJob, out: Path) -> None:
    """Write the log-probabilities of a job's tokens: `logprobs`, float32 [tokens] in nats, 0 at each sequence's first token."""
    batch = of_all_tokens(read_batch(job.batch_path))
    net, place = loaded(job)
    microbatches = pack(batch, list(range(batch.num_sequences)), job.trainer.microbatch_tokens)
    found = logprobs_of(net, batch, microbatches, place)
    files.write(out, safetensors.torch.save({"logprobs": found}))
    parallel.stop()


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write(f"{USAGE}\n")
        return 2
    try:
        job = in_one_process(read_job(Path(arguments[0])))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    write_logprobs(job, Path(arguments[1]))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # as the trainer program does: shutting torch down takes a second or more

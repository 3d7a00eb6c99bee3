"""torchrun's twin with its ranks: real processes in sessions of their own, files as the trainer program writes them, no model.

agent --job.json--> rank 1 --"ready"--> rank 0 --> adapter files, result.json --"done"--> rank 1

Started as torchrun is, through RATCHET_TRAINER_PYTHON; with `--resident FOLDER` it serves a mailbox as infra.megatron.program.serve does.
The bytes that it makes are a fixed function of the digests of what goes in.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import points

SECONDS_A_JOB = 0.2
DECIDE_NOTHING = ("max_tokens_per_microbatch", "mode", "timeout_s")
"""Settings that leave the adapter as it is."""
GRACE_S = 2.0
POLL_S = 0.02
GROUP = "DRILL_GROUP_SOCKET"
"""Descriptor of the ranks' process group, as it were."""
ENDPOINT = "DRILL_GROUP_ENDPOINT"
"""HOST:PORT where rank 0 listens to a rank on another node."""


def agent(num_ranks: int, program: list[str], first: int = 0, endpoint: str | None = None) -> int:
    """Start the ranks from the first on, end all when one fails: torchrun's behaviour and its words. endpoint: Where those of two nodes meet."""

    def terminated(number: int, _: object) -> NoReturn:
        print(f"Received {number} death signal, shutting down workers", flush=True)
        end(ranks)
        sys.exit(1)

    signal.signal(signal.SIGTERM, terminated)
    ranks: list[subprocess.Popen[bytes]] = []
    ends = socket.socketpair() if num_ranks == 2 else (None, None)
    for rank in range(num_ranks):
        environment = os.environ | {"RANK": str(first + rank), "WORLD_SIZE": str(num_ranks)}
        environment |= {ENDPOINT: endpoint} if endpoint else {}
        mine = ends[rank]
        descriptors = (mine.fileno(),) if mine else ()
        environment |= {GROUP: str(mine.fileno())} if mine else {}
        argv = [sys.executable, __file__, "rank", *program]
        ranks.append(subprocess.Popen(argv, env=environment, start_new_session=True, pass_fds=descriptors))
    for each in ends:
        if each:
            each.close()
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        if failed := [(rank, code) for rank, code in zip(ranks, codes, strict=True) if code]:
            dead, code = failed[0]
            died = f"Signal {-code} ({signal.Signals(-code).name}) received by PID {dead.pid}" if code < 0 else ""
            print(f"failed (exitcode: {code}) pid: {dead.pid} {died}", flush=True)
            end(ranks)
            return 1
        time.sleep(POLL_S)


def end(ranks: list["subprocess.Popen[bytes]"]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class Group:
    """What the ranks say to each other; a partner that died is an error, a partner that hangs is waited for."""

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=int(os.environ[GROUP])) if GROUP in os.environ else None
        if ENDPOINT in os.environ:
            self.socket = across_nodes(*os.environ[ENDPOINT].rsplit(":", 1))

    def meet(self) -> None:
        if self.socket is None:
            return
        try:
            self.socket.sendall(b".")
            if self.socket.recv(1):
                return
        except OSError as error:
            raise RuntimeError(f"gloo: {error}") from error
        raise RuntimeError("gloo: connection closed by peer")


def across_nodes(host: str, port: str) -> socket.socket:
    """Rank 0 waits for rank 1, which tries until it is heard."""
    if os.environ["RANK"] == "0":
        with socket.create_server((host, int(port))) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(POLL_S)


def work(job: dict[str, Any], rank: int, group: Group) -> None:
    group.meet()
    for point in ("queue.waiting", "queue.writing", "queue.marking", "queue.playing"):
        points.wait_for(point)
    time.sleep(SECONDS_A_JOB)
    if rank == 0:
        make(job)
    obey(f"rank {rank}")
    group.meet()  # rank 1 stays in the step until rank 0 is through
    obey(f"rank {rank}")
    if rank == 0:
        scores = json.dumps(result_of(job))
        is_garbage = points.ordered("rank 0") == "garbage"
        write(Path(job["result_path"]), (scores[: len(scores) // 2] if is_garbage else scores).encode())
        note_result()


def note_result() -> None:
    """One line for each job that was done, so that the drill can count."""
    cell = points.folder()
    if cell is not None:
        with (cell / "trained.jsonl").open("a") as stream:
            stream.write(json.dumps({"trainer": os.getpid()}) + "\n")


def make(job: dict[str, Any]) -> None:
    """The adapter's files; the point lies between them."""
    trainer = {name: value for name, value in job["trainer"].items() if name not in DECIDE_NOTHING}
    batch = hashlib.sha256(Path(job["batch_path"]).read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps([job["adapter_sha256"], batch, job["seed"], trainer], sort_keys=True).encode()).digest()
    folder, count = Path(job["output_dir"]), job["num_optimizer_steps"] + 1
    weights = safetensors(digest, {"format": "pt"})
    for moment, data in (("exp_avg", digest[::-1]), ("exp_avg_sq", digest[1:] + digest[:1])):
        write(folder / f"state/{moment}.safetensors", safetensors(data, {"num_optimizer_steps": str(count)}))
    points.reach("train.middle")
    obey("rank 0")
    write(folder / "adapter_model.safetensors", weights)
    write(folder / "adapter_config.json", json.dumps({"r": job["trainer"]["lora"]["rank"]}).encode())
    tokens = [5, 6, 7, 8, 9, 10]
    from twin_engine import logprobs

    told = {
        "tokens": tokens,
        "base_logprobs": logprobs(tokens, "base"),
        "adapter_logprobs": logprobs(tokens, hashlib.sha256(weights).hexdigest()),
    }
    write(folder / "state/canary.json", json.dumps(told).encode())


def result_of(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "adapter_version": job["adapter_version"] + 1,
        "num_optimizer_steps": job["num_optimizer_steps"] + 1,
        "metrics": {"train/loss": 0.5, "train/grad_norm": 1.0, "mismatch/mean_abs_logprob_diff": 0.0},
        "seconds": {"train": SECONDS_A_JOB},
        "peak_memory_gib": 0.1,
        "versions": {"twin": "1"},  # as write_interpreters in session.py has it
        "backends": {},
    }


def obey(target: str) -> None:
    """Commit the fault that was ordered."""
    match points.ordered(target):
        case "exit 1":
            print("error: this rank ends itself", file=sys.stderr, flush=True)
            os._exit(1)
        case "out of memory":
            try:
                points.run_out_of_memory()
            except MemoryError:
                traceback.print_exc()
                print(
                    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes", flush=True
                )
                os._exit(1)


def safetensors(data: bytes, metadata: dict[str, str]) -> bytes:
    header = json.dumps(
        {"__metadata__": metadata, "w": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def serve(folder: Path, rank: int, group: Group) -> int:
    """infra.megatron.program.serve without its model; the mailbox is the real one."""
    from infra.megatron.protocol.mailbox import Mailbox, QueuedJob, State
    from infra.processes import children

    box, asked_to_end = Mailbox(folder), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number) if busy else asked_to_end.set())
    box.enter(rank, children.ref_of(os.getpid()))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    busy, number = False, 0
    while True:
        if rank == 0:
            box.publish_state(State(num_done=number, exit_code=0, held_bytes=0, sleep_s=0.0))
        kind = "jobs" if rank == 0 else "turns"
        alone_since = None
        while (order := box.get(kind, number + 1)) is None:
            owner = box.owner()
            alone_since = None if children.find(owner.process) else alone_since or time.monotonic()
            is_alone = alone_since is not None and time.monotonic() - alone_since > owner.grace_s
            if asked_to_end.is_set() or (rank == 0 and (box.is_asked_to_stop() or is_alone)):
                order = QueuedJob(job=None)
                break
            time.sleep(POLL_S)
        if rank == 0:
            box.put("turns", number + 1, order)
        if order.job is None:
            return 0
        busy = True
        work(json.loads(order.job.read_bytes()), rank, group)
        busy = False
        number += 1


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main(arguments: list[str]) -> int:
    if arguments[0] == "rank":
        rank, group, program = int(os.environ["RANK"]), Group(), arguments[1:]
        if program[0] == "--resident":
            return serve(Path(program[1]), rank, group)
        if rank == 0:
            print("micro-batch 1/1  100 tokens  loss +0.500000", flush=True)
        work(json.loads(Path(program[0]).read_bytes()), rank, group)
        return 0
    if "infra.rewards.models.program" in arguments:
        os.execv(sys.executable, [sys.executable, *arguments])  # a reward model has no twin
    num_ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    program = arguments[arguments.index("infra.megatron") + 1 :]
    if "--node-rank" in arguments:
        node, endpoint = (arguments[arguments.index(name) + 1] for name in ("--node-rank", "--rdzv-endpoint"))
        return agent(num_ranks, program, int(node) * num_ranks, endpoint)
    return agent(num_ranks, program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env bash
# The same run on a Ray cluster of two nodes: undisturbed, and with one node killed or cut off for 30 s, in a rollout or in a training:
#   bash tests/benches/cluster.sh FOLDER [CASE ...]
# In rollout-auto and training-auto there are as many replicas as nodes (engine.replicas auto), and the node is killed.
# In the cases one-node and spread* one engine is split in two (tensor_parallel 2): on one node, over both, and over both with its part
# on the second node killed in a rollout. In spread-node and spread-node-back the whole second node is killed, and the run must stop. Then the same
# command goes on: with both parts on the node that is left, or over both when the second is back. In spread-cut and spread-stop the second node is
# cut off, or all its processes are stopped, for 30 s, with the same end. In spread-hung its part is stopped and not continued.
# Digests of these cases must be equal among themselves.
# The nodes are two network namespaces of this machine, joined by a pair of virtual interfaces (needs root), with one workspace folder.
# Real parts on a CPU, minutes a case. Prints the digests of each run's adapters; they must be equal.
#
# With RATCHET_TEST_GPUS=1 each node has a GPU of this machine, and RATCHET_TEST_RUN the options of the run (default: --preset smoke). Digests then
# differ: SGLang does not repeat its bits there. The case node-back is for GPUs: the node is killed in a rollout, the trainer's ranks
# do not fit on the other one, the run must stop, and the same command goes on when the node is back.
source "$(dirname "$0")/in_folder.sh"
shift
RAY=${RATCHET_TEST_RAY:-.venv/bin/ray} # words, as RATCHET_TEST_COMMAND
read -ra RUN <<< "${RATCHET_TEST_RUN:---preset smoke}"
CASES=("${@:-}")
[ -n "${CASES[0]}" ] || CASES=(undisturbed rollout training rollout-cut training-cut)
CUT_S=${RATCHET_TEST_CUT_S:-30}
STEPS=${RATCHET_TEST_STEPS:-3} STRIKE=${RATCHET_TEST_STRIKE:-1} # of which the third and the second, if not told otherwise
NET=${RATCHET_TEST_NETWORK:-10.77.0.0/24} # or of IPv6, such as fd77::/64
case $NET in
  *::/*) ONE=${NET%/*}1 TWO=${NET%/*}2 HEAD="[$ONE]:6379" AT_ONCE=nodad ;;
  *) ONE=${NET%.*}.1 TWO=${NET%.*}.2 HEAD="$ONE:6379" AT_ONCE= ;;
esac
A=ratchet-a-$$ B=ratchet-b-$$ VA=va$$ VB=vb$$
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$FOLDER/ray.token RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
# Otherwise Ray kills agents when this machine's memory is 95% full.
export RAY_memory_monitor_refresh_ms=0
# A node counts as lost after 5 s of silence.
export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=5

mkdir -p "$FOLDER"
(umask 077 && head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
SESSION=$(mktemp -d /tmp/ratchet-ray-XXXX)

end_nodes() { # every process in our two namespaces, and nothing else
  for name in $A $B; do ip netns pids "$name" 2> /dev/null | xargs -r kill "$1" 2> /dev/null || true; done
}
clean() {
  end_nodes -TERM; sleep 3; end_nodes -KILL
  for name in $A $B; do ip netns del "$name" 2> /dev/null || true; done
  rm -rf "$SESSION" "$SESSION-locks"
}
trap clean EXIT

ip netns add $A; ip netns add $B
ip link add $VA netns $A type veth peer name $VB netns $B
ip -n $A addr add "$ONE/${NET#*/}" dev $VA $AT_ONCE; ip -n $B addr add "$TWO/${NET#*/}" dev $VB $AT_ONCE
for name in $A $B; do ip -n $name link set lo up; done
ip -n $A link set $VA up; ip -n $B link set $VB up

on() { # NAMESPACE COMMAND ...: as a program of that node. Its GPU, the folder of its GPU lock and its host for NCCL are its own.
  local own=()
  if [ -n "${RATCHET_TEST_GPUS:-}" ]; then
    own=(-u RATCHET_LOCK_FOLDER CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=one)
    [ "$1" = $A ] || own=(CUDA_VISIBLE_DEVICES=1 RATCHET_LOCK_FOLDER="$SESSION-locks" NCCL_HOSTID=two)
  fi
  ip netns exec "$1" env "${own[@]}" "${@:2}"
}
ray_node() { # NAMESPACE LOG ARGUMENTS: start a node of the cluster, and wait for it
  for _ in 1 2 3 4 5; do # Ray gives up when its node is not there after 30 s, as on a busy machine
    on "$1" $RAY start --block --object-store-memory=83886080 --num-cpus=2 "${@:3}" > "$2" 2>&1 &
    while kill -0 $! 2> /dev/null; do
      if grep -qs "Ray runtime started" "$2"; then return; fi
      sleep 0.2
    done
    ip netns pids "$1" | xargs -r kill -KILL 2> /dev/null || true
  done
  tail -n 3 "$2" >&2; exit 1
}
until_file_has() { # LINES FILE
  until [ "$(wc -l 2> /dev/null < "$2" || echo 0)" -ge "$1" ]; do
    kill -0 "$FLOW" || { echo "the run ended too early" >&2; exit 1; }
    sleep 0.02
  done
}
signal_part() { ip netns pids $B | xargs ps -o pid=,args= -p | awk '/sglang::scheduler/ { print $1 }' | xargs kill "$1"; }
listening() { # addresses on which the engine's processes of a node listen, with the number of their ports
  local pids
  pids=$(ip netns pids "$1" | xargs ps -o pid=,args= -p | awk '/sglang::|sglang_server/ { printf "%spid=%s,", sep, $1; sep = "|" }')
  ip netns exec "$1" ss -Hltnp | grep -E "$pids" | awk '{ print $4 }' | sed 's/:[0-9]*$//' | sort | uniq -c | tr '\n' ' '
}
kill_node() { ip netns pids $B | xargs kill -KILL; }
join_node() { ray_node $B "$FOLDER/$case-node.log" --address="$HEAD" --node-ip-address="$TWO"; }
NO_ROOM="^error: replica 0 of the engine has no node"
start_run() { # or go on with it
  on $A $RATCHET run "${RUN[@]}" --name far --num_steps $STEPS --evaluation.every 0 "${engine[@]}" \
    --trainer.num_processes 2 >> "$FOLDER/$case.log" 2>&1 &
  FLOW=$!
}
has_stopped() { # LINE: wait until a run that needs both nodes ends, and print what it says; the journal's first line is no sample
  local since=$SECONDS
  wait $FLOW && { echo "the run did not stop" >&2; exit 1; }
  grep -m 1 "$1" "$FOLDER/$case.log"
  local samples="all samples" # of a rollout that had ended
  [ ! -f "$step/samples.journal" ] || samples="$(($(wc -l < "$step/samples.journal") - 1)) samples"
  echo "$case: stopped $((SECONDS - since)) s after the strike with $samples"
}
programs_of_node() { # count engines and trainers on the second node
  ip netns pids $B | xargs -r ps -o args= -p | grep -c "sglang_cpu\|sglang_server\|infra\.megatron" || true
}
away() { # cut the only link between the nodes, or stop all processes of the second one
  case $1 in
    cut) ip -n $A link set $VA down ;;
    stop) ip netns pids $B | xargs kill -STOP ;;
  esac
  AWAY=$SECONDS
  echo "$case: $1 with $(programs_of_node) programs on the node"
}
back() { # CUT_S seconds after that undo it; what runs on the node then must end, and is counted
  local left=$((CUT_S - SECONDS + AWAY))
  [ $left -le 0 ] || sleep $left
  echo "$case: back again with $(programs_of_node) programs on the node"
  case $1 in
    cut) ip -n $A link set $VA up ;;
    stop) ip netns pids $B | xargs kill -CONT ;;
  esac
  local since=$SECONDS
  while [ "$(programs_of_node)" != 0 ] && [ $((SECONDS - since)) -lt 120 ]; do sleep 0.2; done
  echo "$case: $(programs_of_node) programs on the node $((SECONDS - since)) s after that"
}

for case in "${CASES[@]}"; do
  export RATCHET_WORKSPACE=$FOLDER/$case RATCHET_CLUSTER_ADDRESS=$HEAD
  rm -rf "$RATCHET_WORKSPACE" "$FOLDER/$case.log"
  mkdir -p "$RATCHET_WORKSPACE"
  cp -a "$MODELS" "$RATCHET_WORKSPACE/models"
  [ ! -d "${MODELS%/*}/kernels" ] || ln -s "$(realpath "${MODELS%/*}/kernels")" "$RATCHET_WORKSPACE/kernels"
  ray_node $A "$FOLDER/$case-head.log" --head --node-ip-address="$ONE" --port=6379 --include-dashboard=false --temp-dir="$SESSION"
  join_node
  engine=(--engine.replicas 2)
  unset RATCHET_CLUSTER_ENGINE_NODES RATCHET_CLUSTER_TRUSTED_NETWORK
  case $case in
    node-back) engine=() ;;
    *-auto) engine=(--engine.replicas auto) ;;
    one-node) engine=(--engine.tensor_parallel 2) ;;
    spread*)
      engine=(--engine.tensor_parallel 2)
      [ "$case" != spread-hung ] || engine+=(--engine.request_timeout_s 30)
      export RATCHET_CLUSTER_ENGINE_NODES=2 RATCHET_CLUSTER_TRUSTED_NETWORK=$NET ;;
  esac
  start_run
  start=$SECONDS
  step=$RATCHET_WORKSPACE/runs/far/steps/00000$STRIKE
  case $case in
    rollout | rollout-auto) until_file_has 2 "$step/samples.journal"; kill_node ;;
    training | training-auto) until_file_has 1 "$step/train/trainer.log"; kill_node ;;
    spread) until_file_has 2 "$step/samples.journal"; echo "$case: the engine listens on $(listening $A)and on $(listening $B)" ;;
    spread-part) until_file_has 2 "$step/samples.journal"; signal_part -KILL ;;
    spread-node) until_file_has 2 "$step/samples.journal"; kill_node; has_stopped "$NO_ROOM"; unset RATCHET_CLUSTER_ENGINE_NODES; start_run ;;
    spread-node-back) until_file_has 2 "$step/samples.journal"; kill_node; has_stopped "$NO_ROOM"; join_node; start_run ;;
    node-back) until_file_has 2 "$step/samples.journal"; kill_node; has_stopped "^error: .*trainer.num_processes 2 does not fit"; join_node; start_run ;;
    spread-hung) until_file_has 2 "$step/samples.journal"; signal_part -STOP ;;
    spread-cut | spread-stop)
      until_file_has 2 "$step/samples.journal"
      away "${case#spread-}"; has_stopped "$NO_ROOM"; back "${case#spread-}"; kill_node || true; join_node; start_run ;;
    rollout-cut) until_file_has 2 "$step/samples.journal"; away cut; back cut ;;
    training-cut) until_file_has 1 "$step/train/trainer.log"; away cut; back cut ;;
  esac
  wait $FLOW || { tail -n 30 "$FOLDER/$case.log"; exit 1; }
  echo "$case: $((SECONDS - start)) s"
  on $A $RATCHET down
  end_nodes -TERM; sleep 3; end_nodes -KILL
  rm -rf "${SESSION:?}"/*
done
for case in "${CASES[@]}"; do
  sha256sum "$FOLDER/$case"/runs/far/adapters/*/adapter_model.safetensors | cut -c1-8 | tr '\n' ' '
  echo "$case, lost and moved:" "$(cat "$FOLDER/$case"/runs/far/steps/*/measures/roll_out.json | grep -o '"num_\(lost\|moved\)[a-z_]*": [0-9]*' | cut -d' ' -f2 | tr '\n' ' ')"
done

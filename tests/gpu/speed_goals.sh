#!/usr/bin/env bash
# The figures that docs/results/speed.md sets goals for, measured on one H200 in one hold: bash tests/gpu/speed_goals.sh FOLDER [PART ...]
# Parts, in this order: cold (0.5B, a start with nothing compiled), mixture (hand-over of 30B-A3B in a run), trainer (30B-A3B alone), small (the
# trainer of 0.5B alone), 7b and 7b-fp8 (a whole step with 16 and with 8 bits in the engine), warm (`ratchet up --warm`, then a start that
# compiles nothing), and by name only: tasks (hand-over of 30B-A3B without Prefect). Results and logs lie in FOLDER, models in MODELS (default: a memory file
# system, 61 GB). The workspace is RATCHET_WORKSPACE. Nothing begins after LIMIT_S seconds (default 1500).
set -uo pipefail
FOLDER=$(realpath -m "$1")
shift
PARTS=${*:-cold mixture trainer small 7b 7b-fp8 warm}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python} MODELS=${MODELS:-/dev/shm/ratchet-models} LIMIT_S=${LIMIT_S:-1500}
export RATCHET_WORKSPACE=${RATCHET_WORKSPACE:-$FOLDER/workspace}
export PYTHONPATH=$PWD:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$FOLDER" "$MODELS"
FLAGS='engine.extra_flags=["--attention-backend","fa3","--sampling-backend","pytorch","--cuda-graph-backend-prefill","disabled","--mm-feature-transport","cpu"]'
measure() { # NAME SECONDS_AT_MOST SCRIPT ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  [ "$SECONDS" -lt "$LIMIT_S" ] || { echo "$name: no time left"; return; }
  timeout --signal=INT --kill-after=30 "$seconds" "$PYTHON" "tests/gpu/$1" "${@:2}" > "$FOLDER/$name.log" 2>&1
  echo "$name: exit status $? after $SECONDS s"
}
ratchet() {
  "$PYTHON" -c 'from flows.cli.app import main; main()' "$@"
}
model() { # SHAPE, made once
  [ -e "$MODELS/$1/config.json" ] || "$PYTHON" tests/gpu/random_model.py "$1" "$MODELS/$1" > "$FOLDER/$1.log" 2>&1
}
MIXTURE=(--prompts 16 --rank 8 --model "$MODELS/qwen3-30b-a3b" --set trainer.mode=persistent --set trainer.max_tokens_per_microbatch=8192
  --set engine.start_timeout_s=400 --set engine.memory_fraction=0.75 --set "$FLAGS")
SEVEN=(run --steps 4 --full-prompts --model "$MODELS/qwen2.5-7b" --set trainer.mode=auto --set trainer.max_tokens_per_microbatch=16384
  --set reward.name=mechanical_reward.reward --set engine.deterministic=false --set "$FLAGS")
SMALL=(--model "$MODELS/qwen2.5-0.5b" --set engine.deterministic=false --set "$FLAGS")
for part in $PARTS; do
  case "$part" in
    cold)
      model qwen2.5-0.5b
      measure cold 300 starts.py "$FOLDER/cold.json" --cases cold warm "${SMALL[@]}"
      grep -h "compiled ahead" "$RATCHET_WORKSPACE"/logs/*.log ;;
    mixture)
      rm -rf "$MODELS/qwen2.5-7b"
      model qwen3-30b-a3b
      measure mixture 500 hand_over.py "$FOLDER/mixture.json" run --steps 7 --output-tokens 512 "${MIXTURE[@]}" --set name=mixture \
        --set trainer.share_experts=true --set engine.colocation=keep_weights --set retention.keep_last=2 ;;
    tasks)
      model qwen3-30b-a3b
      measure tasks 300 hand_over.py "$FOLDER/tasks.json" before_after --ways "experts shared" --steps 4 --output-tokens 128 "${MIXTURE[@]}" ;;
    trainer)
      rm -rf "$MODELS/qwen2.5-7b"
      model qwen3-30b-a3b
      measure trainer 300 train_speed.py "$FOLDER/trainer.json" --model "$MODELS/qwen3-30b-a3b" --tokens 131072 --seq 1024 --rank 8 --repeat 4 \
        --microbatch 13824 --no-fresh ;;
    small)
      measure small 200 trainer_kernels.py "$FOLDER/small.json" --shape qwen2.5-0.5b --microbatch 45056 73728 --repeat 5 --profile ;;
    7b)
      rm -rf "$MODELS/qwen3-30b-a3b"
      model qwen2.5-7b
      # Another workspace, where nothing is compiled: the first start is a cold one.
      RATCHET_WORKSPACE=$RATCHET_WORKSPACE-7b measure 7b 400 hand_over.py "$FOLDER/7b.json" "${SEVEN[@]}" --set name=7b ;;
    7b-fp8)
      rm -rf "$MODELS/qwen3-30b-a3b"
      model qwen2.5-7b
      RATCHET_WORKSPACE=$RATCHET_WORKSPACE-7b measure 7b-fp8 400 hand_over.py "$FOLDER/7b-fp8.json" "${SEVEN[@]}" --set name=7b-fp8 \
        --set engine.quantization=fp8 --set trainer.max_mismatch=null ;;
    warm)
      model qwen2.5-0.5b
      export RATCHET_WORKSPACE=$RATCHET_WORKSPACE-warm
      "$PYTHON" -c 'import json, sys; model, flags = sys.argv[1:]
engine = {"max_context_tokens": 1024, "max_running_requests": 512, "max_lora_rank": 16, "deterministic": False, "extra_flags": json.loads(flags)}
print(json.dumps({"name": "warm", "model": model, "engine": engine}))' "$MODELS/qwen2.5-0.5b" "${FLAGS#*=}" > "$FOLDER/warm.run.json"
      ratchet up --warm "$FOLDER/warm.run.json" > "$FOLDER/up.log" 2>&1
      echo "up --warm: exit status $? after $SECONDS s"
      ratchet down >> "$FOLDER/up.log" 2>&1
      measure warm 200 starts.py "$FOLDER/warm.json" --cases warm "${SMALL[@]}" ;;
    *) echo "no part $part: cold, mixture, trainer, small, 7b, 7b-fp8, warm or tasks"; exit 2 ;;
  esac
done

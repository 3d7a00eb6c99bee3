#!/usr/bin/env bash
# What docs/results/speed.md calls missed, measured again on one H200 in one hold: bash tests/gpu/missed_goals.sh FOLDER [PART ...]
# Parts, in this order: cold (0.5B, a start with nothing compiled), mixture (hand-over of 30B-A3B in a run, then by tasks), trainer (30B-A3B alone),
# 7b (a whole step with 16 and with 8 bits in the engine), warm (`ratchet up --warm`). Results and logs lie in FOLDER, models in MODELS
# (default: a memory file system, 61 GB). The workspace is RATCHET_WORKSPACE. Nothing begins after LIMIT_S seconds (default 1500).
set -uo pipefail
FOLDER=$(realpath -m "$1")
shift
PARTS=${*:-cold mixture trainer 7b warm}
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
model() { # SHAPE, made once
  [ -e "$MODELS/$1/config.json" ] || "$PYTHON" tests/gpu/random_model.py "$1" "$MODELS/$1" > "$FOLDER/$1.log" 2>&1
}
for part in $PARTS; do
  case "$part" in
    cold)
      model qwen2.5-0.5b
      measure cold 300 starts.py "$FOLDER/cold.json" --cases cold warm --model "$MODELS/qwen2.5-0.5b" --set engine.deterministic=false --set "$FLAGS"
      grep -h "compiled ahead" "$RATCHET_WORKSPACE"/logs/*.log ;;
    mixture)
      model qwen3-30b-a3b
      MIXTURE=(--prompts 16 --rank 8 --model "$MODELS/qwen3-30b-a3b" --set trainer.mode=persistent --set trainer.max_tokens_per_microbatch=8192
        --set engine.start_timeout_s=400 --set engine.memory_fraction=0.75 --set "$FLAGS")
      measure mixture-run 500 hand_over.py "$FOLDER/mixture-run.json" run --steps 4 --output-tokens 512 "${MIXTURE[@]}" \
        --set trainer.share_experts=true --set engine.colocation=keep_weights
      measure mixture-tasks 300 hand_over.py "$FOLDER/mixture-tasks.json" before_after --ways "experts shared" --steps 4 --output-tokens 128 "${MIXTURE[@]}" ;;
    trainer)
      model qwen3-30b-a3b
      measure trainer 300 train_speed.py "$FOLDER/trainer.json" --model "$MODELS/qwen3-30b-a3b" --tokens 131072 --seq 1024 --rank 8 --repeat 2 \
        --microbatch 13824 --no-fresh ;;
    7b)
      rm -rf "$MODELS/qwen3-30b-a3b"
      model qwen2.5-7b
      SEVEN=(run --steps 4 --full-prompts --model "$MODELS/qwen2.5-7b" --set trainer.mode=auto --set trainer.max_tokens_per_microbatch=16384
        --set reward.name=mechanical_reward.reward --set engine.deterministic=false --set "$FLAGS")
      measure 7b 400 hand_over.py "$FOLDER/7b.json" "${SEVEN[@]}"
      measure 7b-fp8 400 hand_over.py "$FOLDER/7b-fp8.json" "${SEVEN[@]}" --set engine.quantization=fp8 --set trainer.max_mismatch=null ;;
    warm)
      (export RATCHET_WORKSPACE=$RATCHET_WORKSPACE-warm; .venv/bin/ratchet up --warm arithmetic-gpu; .venv/bin/ratchet down) > "$FOLDER/warm.log" 2>&1
      echo "warm: exit status $? after $SECONDS s" ;;
    *) echo "no part $part: cold, mixture, trainer, 7b or warm"; exit 2 ;;
  esac
done

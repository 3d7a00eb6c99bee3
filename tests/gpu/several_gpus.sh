#!/usr/bin/env bash
# All rows of several_gpus.py on a machine with 4 GPUs, or 2: bash tests/gpu/several_gpus.sh FOLDER MODEL 4 [options of several_gpus.py]
# With 4 GPUs the layouts of one and two GPUs come first, side by side, each on GPUs of its own; then those that need all GPUs. Results and logs
# lie in FOLDER, all rows in FOLDER/all.json. The workspace is RATCHET_WORKSPACE; the second one, for the layout of one GPU, shares its kernels.
# It ends after LIMIT_S seconds (default 540) with what it has.
set -uo pipefail
FOLDER=$(realpath -m "$1") MODEL=$(realpath -m "$2") NUM=$3
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PORT=${RATCHET_TEST_FIRST_PORT:-46800}
WORKSPACE=${RATCHET_WORKSPACE:-$FOLDER/workspace}
PYTHON=${PYTHON:-.venv/bin/python}
LIMIT_S=${LIMIT_S:-540}
export PYTHONPATH=$PWD:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$FOLDER" "$WORKSPACE/kernels" "$WORKSPACE-one"
ln -sfn "$WORKSPACE/kernels" "$WORKSPACE-one/kernels"
rows() { # NAME WORKSPACE FIRST_PORT GPUS OPTIONS...
  local name=$1 workspace=$2 port=$3 gpus=$4
  shift 4
  [ -n "$gpus" ] && export CUDA_VISIBLE_DEVICES=$gpus
  export RATCHET_WORKSPACE=$workspace RATCHET_LOCK_FOLDER=$workspace-locks
  export RATCHET_ENGINE_PORT=$port RATCHET_PREFECT_PORT=$((port + 20)) RATCHET_MLFLOW_PORT=$((port + 21))
  mkdir -p -m 700 "$RATCHET_LOCK_FOLDER"
  "$PYTHON" tests/gpu/several_gpus.py "$FOLDER/$name.json" "$MODEL" --limit-s $((LIMIT_S - SECONDS)) "$@" > "$FOLDER/$name.log" 2>&1
  echo "$name: $? after $SECONDS s"
}
if [ "$NUM" = 4 ]; then
  (rows one "$WORKSPACE-one" $((PORT + 30)) 3 "$@" --rows 1:0) &
  (rows two "$WORKSPACE" "$PORT" 0,1 "$@" --rows 1+1:1 "1+1:1 in flight") &
  wait
  (rows all "$WORKSPACE" "$PORT" "" "$@" --rows 2+DP2:1 auto:1 2+TP2:1 "4x DP4:0" auto:0 --also "$FOLDER"/{one,two}.json)
else
  (rows all "$WORKSPACE" "$PORT" "" "$@" --rows 1+1:1 "1+1:1 in flight" auto:1 "2x DP2:0" auto:0 1:0)
fi
sed -n '/^| layout/,$p' "$FOLDER/all.log"

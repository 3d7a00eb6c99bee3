#!/usr/bin/env bash
# A run loses its machine and goes on from its copy in an S3 server: bash tests/benches/store_resume.sh FOLDER
# Real parts on a CPU, a few minutes. Prints the digests of an undisturbed run's adapters and of the continued one's; they must be equal.
source "$(dirname "$0")/in_folder.sh"
export AWS_ENDPOINT_URL=http://127.0.0.1:$PORT AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=us-east-1
RUN=(run --preset smoke --name far --num_steps 8 --evaluation.every 0)
mkdir -p "$FOLDER"/{undisturbed,first,second}
for workspace in undisturbed first second; do cp -a "$MODELS" "$FOLDER/$workspace/models"; done

.venv/bin/moto_server -p "$PORT" > "$FOLDER/s3.log" 2>&1 &
SERVER=$!
trap 'kill $SERVER' EXIT
until .venv/bin/python -c "import boto3; boto3.client('s3').create_bucket(Bucket='runs')" 2> /dev/null; do sleep 1; done

RATCHET_WORKSPACE=$FOLDER/undisturbed $RATCHET "${RUN[@]}"
RATCHET_WORKSPACE=$FOLDER/undisturbed $RATCHET down

export RATCHET_STORE_URL=s3://runs/team
RATCHET_WORKSPACE=$FOLDER/first $RATCHET "${RUN[@]}" &
FLOW=$!
until grep -qs step-000001 "$FOLDER/first/runs/far/copied.json"; do sleep 0.1; done
kill -9 $FLOW
RATCHET_WORKSPACE=$FOLDER/first $RATCHET down
mv "$FOLDER/first" "$FOLDER/lost"

RATCHET_WORKSPACE=$FOLDER/second $RATCHET runs --store s3://runs/team
RATCHET_WORKSPACE=$FOLDER/second $RATCHET run --from s3://runs/team/far
RATCHET_WORKSPACE=$FOLDER/second $RATCHET upload
RATCHET_WORKSPACE=$FOLDER/second $RATCHET down
for workspace in undisturbed second; do
  sha256sum "$FOLDER/$workspace"/runs/far/adapters/*/adapter_model.safetensors | cut -c1-16 | tr '\n' ' '
  echo "$workspace"
done

#!/bin/bash
# Run a file in shards, with one Hugging Face job per shard. The bucket contains requests.jsonl and
# Tidemill's wheel, and receives the rows:
#   bash hf-jobs.sh ORG BUCKET 8
set -eu
namespace=$1 bucket=$2 shards=$3

for shard in $(seq "$shards"); do
    hf jobs run --detach --namespace "$namespace" --flavor l4x1 --timeout 4h --attempts 3 \
        --secrets HF_TOKEN --volume "hf://buckets/$namespace/$bucket:/data" \
        python:3.12 bash -c "pip install \"\$(ls /data/tidemill-*.whl)[engine,tables]\" &&
            exec tidemill run /data/requests.jsonl -o /data/rows.jsonl --resume --model Qwen/Qwen3-8B \
                --shard $shard/$shards"
done

#!/bin/bash
# A file in shards, each a job of Hugging Face's; the bucket holds requests.jsonl and tidemill's wheel,
# and gets the rows:
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

#!/usr/bin/env bash
# What only a GPU machine can show, in at most 8 minutes and one table: device copies, CUDA IPC between two processes on one GPU,
# NCCL between two GPUs, weight syncs on the device, decoding, prefill and training beside the
# device's limits. What the machine lacks is listed as 'not run'.
#
#     benchmarks/gpu_session.sh [PYTHON]
set -u
cd "$(dirname "$0")/.."
exec timeout --signal=INT --kill-after=10 480 "${1:-${PYTHON:-python}}" -m benchmarks._gpu_session

#!/usr/bin/env bash
# The training command under torchrun: torchrun starts the processes, one for each device.
#   examples/torchrun.sh CONFIG NUM_PROCESSES [OPTION ...]
# On several nodes replace --standalone by --nnodes, --node-rank and --rdzv-endpoint, and add --trainer.num_nodes.
set -euo pipefail
usage="usage: examples/torchrun.sh CONFIG NUM_PROCESSES [OPTION ...]"
config=${1:?$usage} processes=${2:?$usage}
shift 2
exec torchrun --standalone --nproc-per-node "$processes" -m lightning_seq1f1b \
  fit --config "$config" --trainer.devices "$processes" "$@"

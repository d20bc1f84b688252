#!/usr/bin/env bash
# The training command under torchrun: torchrun starts the processes, one for each device.
#   examples/torchrun.sh CONFIG NUM_PROCESSES [OPTION ...]
# On several nodes replace --standalone by --nnodes, --node-rank and --rdzv-endpoint, and add --trainer.num_nodes.
# With MAX_RESTARTS=2, all processes are started anew when one ends, twice at most. To go on from the last checkpoint add
#   --ckpt_path last --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath=FOLDER
#   --trainer.callbacks.save_last=true --trainer.callbacks.every_n_train_steps=100
set -euo pipefail
usage="usage: examples/torchrun.sh CONFIG NUM_PROCESSES [OPTION ...]"
config=${1:?$usage} processes=${2:?$usage}
shift 2
exec torchrun --standalone --max-restarts "${MAX_RESTARTS:-0}" --nproc-per-node "$processes" -m lightning_seq1f1b \
  fit --config "$config" --trainer.devices "$processes" "$@"

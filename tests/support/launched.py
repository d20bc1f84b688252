"""A user's program, however its processes are started: it trains and prints each rank's losses as JSON.

`launched.py [DEVICES [NODES]]`, two devices on one node by default.
"""

import json
import sys

import lightning as L
from support.fitting import rows
from support.training import QUIET, FineTune, Recorder

from lightning_seq1f1b import Seq1F1BStrategy


def main(devices: int = 2, num_nodes: int = 1) -> None:
    """Train for one epoch and print a line that starts with "ended"."""
    recorder = Recorder()
    places = {"devices": devices, "num_nodes": num_nodes, "strategy": Seq1F1BStrategy(num_chunks=3)}
    trainer = L.Trainer(**QUIET, **places, max_epochs=1, callbacks=[recorder])
    trainer.fit(FineTune(), rows())
    # One write, so that the lines of two processes do not mix.
    print("ended " + json.dumps({"rank": trainer.global_rank, "losses": recorder.losses}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

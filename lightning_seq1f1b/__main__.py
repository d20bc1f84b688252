"""`python -m lightning_seq1f1b` is the command `lightning-seq1f1b`."""

import sys

from lightning_seq1f1b.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

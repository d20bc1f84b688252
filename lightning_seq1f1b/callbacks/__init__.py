"""Callbacks for training on stages; most of them work on one device too."""

"""Runs a plan on one rank: batches into chunks, tensors between stages, forwards and backwards in the plan's order."""

"""The Lightning strategy: the one part, with the command line, that imports Lightning."""

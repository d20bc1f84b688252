"""The attention op with reuse of earlier chunks' keys and values, and its slow twin."""

"""Imported once by the fork server: what nearly every multi-process test needs."""

import transformers.models.llama.modeling_llama  # noqa: F401

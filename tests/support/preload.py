"""Imported once by the fork server: what nearly every multi-process test needs."""

import transformers.models.llama.modeling_llama  # noqa: F401 (imported for the server that forks)
from support import fitting  # noqa: F401 (the same)
from support.trial_runs import remember_trial_runs

remember_trial_runs()

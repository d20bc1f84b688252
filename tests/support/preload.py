"""Imported once by the fork server: what nearly every multi-process test needs."""

import transformers.models.llama.modeling_llama  # noqa: F401
from support import fitting  # noqa: F401
from support.trial_runs import remember_trial_runs

remember_trial_runs()

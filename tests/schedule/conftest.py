"""How hard hypothesis tries here."""

from hypothesis import settings

# No deadline: on shared cores a slow example says nothing about the code.
settings.register_profile("schedule", deadline=None, max_examples=50)
settings.load_profile("schedule")

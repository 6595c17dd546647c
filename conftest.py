"""Settings that hold for the tests of all packages."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Timing says nothing on a shared machine, so neither slow examples nor slow generation fail a test. The blob that
# repeats a failure is printed.
settings.register_profile(
    "rollbridge", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("rollbridge")

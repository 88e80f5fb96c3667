"""How many examples a property gets: few and always the same ones in the tests, ever new ones for minutes in `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: Set by `make fuzz`.
LONG = "KEDGE_FUZZ" in os.environ

fuzzed = settings(
    max_examples=200 if LONG else 100,
    derandomize=not LONG,
    deadline=None,
    database=None,
    print_blob=LONG,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

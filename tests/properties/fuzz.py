"""`make fuzz MINUTES=15`: each door of Kedge is tried on ever new examples, for so many minutes."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module

from hypothesis import seed
from hypothesis.errors import HypothesisWarning

DOORS = {
    "recordings": ("test_hostile_recordings", "test_a_damaged_recording_is_read_or_refused"),
    "datasets": ("test_hostile_datasets", "test_a_damaged_data_set_is_read_right_or_refused"),
    "commands": ("test_hostile_commands", "test_any_command_line_ends_with_a_status"),
    "selectors": ("test_selectors_round_trip", "test_any_text_at_all_is_read_or_pointed_at"),
}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fuzz(prop: Callable[[], None], minutes: float, first: int) -> bool:
    """Try a property on new examples; return whether it always holds.

    The seed of a failure is printed.
    """
    end, number = time.monotonic() + 60 * minutes, first
    while time.monotonic() < end:
        try:
            seed(number)(prop)()
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is searched for
            traceback.print_exc()
            say(f"seed {number} fails")
            return False
        number += 1
    say(f"{number - first} rounds of 200 examples, seeds from {first} on")
    return True


def main() -> int:
    """Try the named doors, or all."""
    minutes, *names = sys.argv[1:]
    os.environ["KEDGE_FUZZ"] = "1"
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=HypothesisWarning)
    held = []
    for name in names or DOORS:
        module, prop = DOORS[name]
        say(f"{name}: {minutes} minutes")
        held.append(
            fuzz(
                getattr(import_module(f"tests.properties.{module}"), prop),
                float(minutes),
                time.time_ns() >> 20,
            )
        )
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())

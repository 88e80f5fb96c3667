"""``python -m kedge`` is ``kedge``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # As for the script `kedge`, and not the working directory, whose modules may have the names of
    # those that Kedge imports.
    sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120 - pathlib would be imported from there

from kedge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

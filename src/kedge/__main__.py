"""``python -m kedge`` is ``kedge``."""

from __future__ import annotations

import sys

from kedge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

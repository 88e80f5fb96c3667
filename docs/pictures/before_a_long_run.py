"""Draw `before-a-long-run.png`, the picture of docs/tutorial/before-a-long-run.md, from the program on that page.

python docs/pictures/before_a_long_run.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "tutorial" / "before-a-long-run.md"


def main() -> None:
    """Examine the page's program, and write the picture beside this file."""
    found = re.search(r'write_text\("""\n(.*?)"""\)', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE} has no program")
    picture = HERE / "before-a-long-run.png"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "write.py").write_text(found[1], encoding="utf-8")
        command = ("-m", "kedge", "examine", "--picture", str(picture), "write.py")
        subprocess.run([sys.executable, *command], cwd=folder, check=False)  # noqa: S603 - this checkout's own


if __name__ == "__main__":
    main()

"""Writes below each block of a page what it prints: `python docs/refresh.py docs/library.md ...`

For when what is printed has changed and is right; `tests/test_pages.py` compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

PROGRAM = re.compile(r"^(```python[^\n]*\n(.*?)^```\n)(?:\n```text\n.*?^```\n)?", re.M | re.S)


def refresh(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}

    def with_output(found: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(found[2], "example.py", "exec"), names)
        printed = output.getvalue()
        return found[1] + (f"\n```text\n{printed}```\n" if printed else "")

    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = PROGRAM.sub(with_output, text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in sys.argv[1:]:
        refresh(Path(name).resolve())

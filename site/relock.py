"""`make relock`: renew the locks of all quotes. Read the text around each that is listed before you commit it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[:2])

from bookext.quotes import ROOT, pages, relock

for page in pages().values():
    text, changed = relock(page.read_text())
    page.write_text(text)
    for name in changed:
        print(f"{page.relative_to(ROOT)}: {name} changed; read the text around it")

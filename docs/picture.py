# SPDX-License-Identifier: Apache-2.0
"""The picture of the README, from what ``attach`` really printed.

COLUMNS=120 script -qec "profinferd attach -q -p PID -d 10" /dev/null |
    python docs/picture.py >docs/attach.svg
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 120


def picture(printed: str) -> str:
    """An SVG of a terminal that shows ``printed`` (text with ANSI colours)."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in printed.replace("\r", "").rstrip("\n").split("\n"):
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    svg = console.export_svg(title="profinferd attach", unique_id="attach")
    # A picture fetches nothing: without the fonts that rich names, the viewer's own will do.
    return re.sub(r"@font-face\s*\{[^}]*\}", "", svg)


if __name__ == "__main__":
    sys.stdout.write(picture(sys.stdin.read()))

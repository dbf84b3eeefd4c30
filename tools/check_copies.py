"""Check that the agents differ only in the pooling head.

    python tools/check_copies.py [--fix]

Each file must equal agents/ppo_adapool.py except in its first line and `class PoolingHead`. The exit status is 1 if a
file differs, and the output names it. --fix rewrites the file and exits with 0.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

AGENTS = Path(__file__).parents[1] / "agents"
FILES = [f"ppo_{head}.py" for head in ("adapool", "avgpool", "clstoken", "maxpool")]  # excludes users' own copies
HEAD = re.compile(r'\A""".*?\n|^class PoolingHead\(.*?(?=^class )', re.MULTILINE | re.DOTALL)


def with_head_of(text: str, own: str) -> str:
    """Return an agent's text with the first line and the pooling head of `own`."""
    parts = iter(HEAD.findall(own))
    return HEAD.sub(lambda _: next(parts), text)


def main(fix: bool) -> int:
    """Compare the agents, rewrite those that differ if `fix`, and return the exit status."""
    source, status = (AGENTS / "ppo_adapool.py").read_text(encoding="utf-8"), 0
    for path in (AGENTS / name for name in FILES):
        own = path.read_text(encoding="utf-8")
        expected = with_head_of(source, own)
        if own != expected:
            print(f"agents/{path.name}: differs from agents/ppo_adapool.py outside PoolingHead")
            status = 1
            if fix:
                path.write_text(expected, encoding="utf-8")
    return 0 if fix else status


if __name__ == "__main__":
    sys.exit(main("--fix" in sys.argv[1:]))

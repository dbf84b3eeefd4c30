"""Check that the pooling head in each agent equals its class in noisy_envs/pooling.py.

    python tools/check_copies.py [--fix]

Exit 0: all equal. Exit 1: some differ, named; with --fix they are mended.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADS = {"ppo_adapool.py": "AdaPool"}
BEGIN, END = "# pooling head: the class of noisy_envs/pooling.py, word for word\n", "# end of pooling head\n"


def class_source(name: str) -> str:
    """Return the source of a class of noisy_envs/pooling.py."""
    text = (ROOT / "noisy_envs" / "pooling.py").read_text()
    node = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def main(fix: bool) -> int:
    """Compare, mend if asked, and return the exit status."""
    status = 0
    for file, name in HEADS.items():
        path = ROOT / "agents" / file
        text = path.read_text()
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        wanted = f"{before}{BEGIN}{class_source(name)}\n\n{END}{after}"
        if text != wanted:
            print(f"agents/{file}: the block differs from {name} in noisy_envs/pooling.py")
            status = 1
            if fix:
                path.write_text(wanted)
    return 0 if fix else status


if __name__ == "__main__":
    sys.exit(main("--fix" in sys.argv[1:]))

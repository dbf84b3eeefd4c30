"""Check that the agents differ in the pooling head alone, and that each head is the library's.

    python tools/check_copies.py [--fix]

Between the marks of each agent stand its class, as in noisy_envs/nn/pooling.py, and how it is made; all else must be
that of agents/ppo_adapool.py. Exit 0: all is equal. Exit 1: some differ, named; with --fix they are mended, exit 0.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADS = {
    "ppo_adapool.py": "AdaPool",
    "ppo_avgpool.py": "AvgPool",
    "ppo_maxpool.py": "MaxPool",
    "ppo_clstoken.py": "ClsToken",
}
BEGIN, END = "# pooling head: the class of noisy_envs/nn/pooling.py, word for word\n", "# end of pooling head\n"
MAKE = "\n\ndef make_pool("  # begins what each agent has of its own


def class_source(name: str) -> str:
    """Return the source of a class of noisy_envs/nn/pooling.py."""
    text = (ROOT / "noisy_envs" / "nn" / "pooling.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def parts(text: str) -> tuple[str, str, str, str]:
    """Split an agent at the marks: before the head, its class, how it is made, after it."""
    before, rest = text.split(BEGIN)
    block, after = rest.split(END)
    head, own = block.split(MAKE)
    return before, head, own, after


def main(fix: bool) -> int:
    """Compare, mend if asked, and return the exit status."""
    status = 0
    before, _, _, after = parts((ROOT / "agents" / next(iter(HEADS))).read_text(encoding="utf-8"))
    for file, name in HEADS.items():
        path = ROOT / "agents" / file
        found = path.read_text(encoding="utf-8")
        own_before, head, own, own_after = parts(found)
        if head != class_source(name):
            print(f"agents/{file}: the block differs from {name} in noisy_envs/nn/pooling.py")
        if (own_before, own_after) != (before, after):
            print(f"agents/{file}: differs from agents/ppo_adapool.py outside the block")
        wanted = f"{before}{BEGIN}{class_source(name)}{MAKE}{own}{END}{after}"
        if found != wanted:
            status = 1
            if fix:
                path.write_text(wanted, encoding="utf-8")
    return 0 if fix else status


if __name__ == "__main__":
    sys.exit(main("--fix" in sys.argv[1:]))

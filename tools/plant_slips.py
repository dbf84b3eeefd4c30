"""Plant 40 small faults, one at a time, and report which ones the tests catch: python tools/plant_slips.py TREE.

Each fault ("slip") is a regular expression and its replacement, applied to every `*.py` in its folders in a copy of
TREE, so that it survives moved code. A pattern without a match is an error: adapt it to the code. Run this program
before and after a large change of code or tests, and compare the results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

BOTH, AGENTS = ("noisy_envs", "agents"), ("agents",)
# Test files or tests below tests/, in the order in which they run; of "a|b" the first that exists runs.
TAG = ("test_simple_tag", "test_golden", "test_versions")
CENTROID = ("test_simple_centroid", "test_golden", "test_versions")
STEP = ("test_functional|test_pure_step", "test_vector_env|test_vector", "test_ends", "test_versions")
BOX, WRAPPERS = ("test_box_world", "test_versions"), ("test_wrappers",)
POOLING = ("test_pooling", "test_pooling_examples")
COPIES = "test_agent_heads|test_agent::test_copies_are_checked_and_mended"
HEADS = ("test_padding", "test_agent_learning|training/test_ppo", "test_training_versions", COPIES)
PPO = ("test_agent_learning|training/test_ppo", "test_agent_sanity|training/test_sanity", "test_training_versions")
RESUME = ("test_agent|training/test_run", "test_agent_learners|training/test_several_agents")
SCHEDULES = (*PPO, RESUME[0])
LIMIT = 240  # seconds of tests per slip


class Slip(NamedTuple):
    """A fault and the tests that should catch it."""

    name: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]
    folders: tuple[str, ...] = BOTH


# fmt: off
SLIPS = (
    # rules of the games
    Slip("position moves with the new velocity", r"( +position = .*\n)( +velocity = .*DAMPING.*\n)", r"\2\1", TAG),
    Slip("absent bodies exert forces", r"(\w+) if present is None else \1 & present", r"\1", TAG),
    Slip("velocities in tokens are absolute", r'("frame": .*)\[1, 1, 1, 1, 0\]', r"\1[1, 1, 0, 0, 0]", CENTROID),
    Slip("a range of counts never reaches its end", r"(highest\((\w+)\) - lowest\(\2\)) \+ 1\)", r"\1)", TAG),
    Slip("absent signal counts in the centroid", r"/ xp\.sum\(present, .*\)", "/ present.shape[1]", CENTROID),
    Slip("touches are rewarded if one kind collides", r"(collidable_predators) and (self\.\w+ else)", r"\1 or \2", TAG),
    Slip("a key opens boxes before it is taken", r"fits = held & ", "fits = ", BOX),
    Slip("outcomes do not move with their boxes", r"xp\.where\(moved, next_\w+, (\w+)\)", r"\1", BOX),
    # interfaces and wrappers
    Slip("the first step reuses the reset's numbers", r"uniforms\(key, clock \+ 1,", "uniforms(key, clock,", STEP),
    Slip("a terminated game is also truncated", r"(?<![.\w])truncated & ~terminated", "truncated", STEP),
    Slip("an auto-reset repeats the episode", r"\((rows, \w+, \w+) \+ 1\)", r"(\1)", STEP),
    Slip("final tokens come from the next episode", r"(tokens, )final_(tokens, reward,)", r"\1\2", STEP),
    Slip("all parallel environments share one seed", r"(= base \+ )(np\.arange\()", r"\g<1>0 * \2", STEP),
    Slip("scripts take the first agents' numbers", r"\.(policy|random)\[:, (\w+):(\w+)\]", r".\1[:, : \3 - \2]", STEP),
    Slip("the mask is not shuffled with the tokens", r"tokens, signal = (permuted?\()", r"tokens, _ = \1", WRAPPERS),
    Slip("frozen noise is drawn in each step", r"moment\.start if self\.frozen else moment", "moment", WRAPPERS),
    # pooling heads: two in the library, two in the agents
    Slip("AvgPool counts padding", r"(return \(mask.*) / mask\.sum\(.*clamp\(min=1\)", r"\1 / mask.shape[1]", POOLING),
    Slip("scores are scaled by the full width", r"dim / num_heads(\) if scale is None)", r"dim\1", POOLING),
    Slip("the agent's AdaPool attends to padding",
         r"scores\.masked_fill\(~(?:mask\[:, None\]|\(mask.*\)), -\w+\.inf\)", "scores", HEADS, AGENTS),
    Slip("the agent's ClsToken reads token -1", r"(pooled = embeddings|return x)\[:, 0\]", r"\1[:, -1]", HEADS, AGENTS),
    # PPO
    Slip("clipping takes the larger objective", r"(policy_loss = -torch\.)min", r"\1max", PPO),
    Slip("advantages forget gamma", r"gamma \* (gae_lambda \* )", r"\1", PPO),
    Slip("advantages leak over the end of an episode",
         r"\(~\(?(ended|done|\w+\.terminated)(?: \| \w+\.truncated)?\)?\)\.(to|float)\(", r"(\1 | True).\2(", PPO),
    Slip("a truncated episode does not bootstrap", r"return (\w+) \* ~(\w+)\.terminated",
         r"return \1 * ~(\2.terminated | \2.truncated)", PPO),
    Slip("truncation bootstraps from the next episode", r"(\w+\.truncated) & ~(\w+\.terminated)", r"\1 & \2", PPO),
    Slip("advantages are not centred", r"\((\w+) - (?:mean|center)\) / \(", r"\1 / (", PPO),
    Slip("the value learns the advantage", r"(targets?) = (gains|advantages?) \+ \w+\.values?\b", r"\1 = \2", PPO),
    Slip("entropy is a cost", r"- (args\.ent_coef \* entropy)", r"+ \1", PPO),
    Slip("KL has its arguments swapped", r"\((samples\.\w+), parameters\)(\.mean)", r"(parameters, \1)\2", PPO),
    Slip("the KL penalty grows where KL is small", r"1\.5 if (\S+) > 2 \* (\S+)", r"1.5 if \1 < \2 / 2", SCHEDULES),
    Slip("minibatches are drawn with replacement", r"torch\.randperm\(([^,]+), ", r"torch.randint(\1, (\1,), ", PPO),
    Slip("the learning rate falls early", r"(\(1 - |args, )(self\.updates|iteration) /", r"\1(\2 + 1) /", SCHEDULES),
    Slip("gradients are not clipped", r"(clip_grad_norm_\(.*, )[\w.]+\)", r"\g<1>1e9)", PPO),
    Slip("dropout does not scale up", r"(change \* \w+|keep.*\)) / .*(self\.keep|dropout\))", r"\1", PPO),
    Slip("log-probabilities lack log_std", r"(0\.5 \* squares) \+ log_std", r"\1", PPO),
    Slip("Gumbel noise has the wrong sign", r"-((?:noise|torch.*)\.exponential_\(.*\)\.log\(\))", r"\1", PPO),
    Slip("evaluation uses training seeds", r'f"\{seed\} \{purpose\}"', 'f"{seed}"', RESUME),
    Slip("a resumed run forgets its generator", r"( )(?:\w+\.)*generator\.set_state\(.*\)", r"\1pass", RESUME),
    Slip("a resumed run forgets Adam's moments", r"( )(?:self\.)?optimizer\.load_state_dict\(.*\)", r"\1pass", RESUME),
    Slip("a resumed run counts steps from zero", r"self\.step(, self\.updates.* = content)", r"_\1", RESUME),
)
# fmt: on


def copy_tree(tree: Path, target: Path) -> Path:
    """Copy the files tracked by git in `tree` to the new folder `target`."""
    listed = subprocess.run(["git", "-C", tree, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, target / name)
    return target


def plant(slip: Slip, tree: Path) -> list[str]:
    """Apply a slip to the files of `tree` and return the changed places as "path:line"."""
    places = []
    for path in sorted(file for folder in slip.folders for file in (tree / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        starts = [match.start() for match in re.finditer(slip.pattern, text)]
        if starts:
            changed = re.sub(slip.pattern, slip.replacement, text)
            compile(changed, path, "exec")  # a slip must be a fault, not a syntax error
            path.write_text(changed, encoding="utf-8")
            places += [f"{path.relative_to(tree).as_posix()}:{text.count(chr(10), 0, start) + 1}" for start in starts]
    return places


def files_of(names: Sequence[str], tree: Path) -> list[str]:
    """Return the paths of the named test files or tests; raise FileNotFoundError for a name without a file."""
    test_ids: dict[str, None] = {}  # an ordered set
    for name in names:
        for file, colons, test in (choice.partition("::") for choice in name.split("|")):
            files = sorted(tree.glob(f"tests/**/{file}.py"))
            paths = [path for path in files if test in path.read_text(encoding="utf-8")]
            test_ids |= {path.relative_to(tree).as_posix() + colons + test: None for path in paths}
            if paths:
                break
        else:
            raise FileNotFoundError(f"{tree}: expected a test file {name}")
    return list(test_ids)


def run_tests(tree: Path, files: Sequence[str], limit: int = 0) -> dict[str, Any]:
    """Run tests of `tree` until one fails: "missed", "caught" (by which test), "broken" or "timeout"."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
    command = ["timeout", "--signal=KILL", str(limit)]  # also kills programs that tests have started; 0 is no limit
    command += [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp"]
    command += ["-m", "not slow and not process", *files]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    seconds = round(time.monotonic() - start)
    if done.returncode == 0:
        return {"result": "missed", "seconds": seconds}
    if done.returncode in (-9, 137):
        return {"result": "timeout", "seconds": seconds}
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py::.*)$", done.stdout, re.MULTILINE)
    if failed is None:  # nothing was tested, for example because an import failed
        return {"result": "broken", "seconds": seconds, "by": (done.stdout + done.stderr)[-2000:]}
    return {"result": "caught", "seconds": seconds, "by": failed[1][:300]}


def try_slip(slip: Slip, tree: Path, dry_run: bool) -> dict[str, Any]:
    """Plant a slip in a copy of `tree` and run its tests there, unless `dry_run`."""
    with tempfile.TemporaryDirectory(prefix="slip_") as folder:
        copy = copy_tree(tree, Path(folder) / "tree")
        places, files = plant(slip, copy), files_of(slip.tests, copy)
        if not places:
            return {"result": "not found", "by": slip.pattern}
        return ({"result": "planted"} if dry_run else run_tests(copy, files, LIMIT)) | {"places": places}


def main() -> None:
    """Check that the tests pass without a slip, then try each slip; exit with 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path, help="checkout to copy, which is not changed")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of the names of slips")
    parser.add_argument("--jobs", type=int, default=1, help="slips to try in parallel")
    parser.add_argument("--out", type=Path, default=Path("slips.json"), help="JSON file in which results are updated")
    parser.add_argument("--dry-run", action="store_true", help="find the places without running tests")
    args = parser.parse_args()
    slips = [slip for slip in SLIPS if any(part in slip.name for part in args.only)]
    if not args.dry_run:
        with tempfile.TemporaryDirectory(prefix="slip_") as folder:
            copy = copy_tree(args.tree, Path(folder) / "tree")
            clean = run_tests(copy, files_of([name for slip in slips for name in slip.tests], copy))
        if clean["result"] != "missed":
            sys.exit(f"error: the tests fail without a slip: {clean['by']}")
        print(f"the tests pass without a slip in {clean['seconds']} s", flush=True)
    results: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    with ThreadPoolExecutor(args.jobs) as pool:
        tried = pool.map(partial(try_slip, tree=args.tree, dry_run=args.dry_run), slips)
        for slip, result in zip(slips, tried, strict=True):
            results[slip.name] = result
            print(f"{slip.name}: {result['result']} {result.get('by', result.get('places', ''))}", flush=True)
            if not args.dry_run:
                args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    expected = "planted" if args.dry_run else "caught"
    missed = [slip.name for slip in slips if results[slip.name]["result"] != expected]
    print(f"{len(slips) - len(missed)} of {len(slips)} {expected}" + "".join(f"\n  not: {name}" for name in missed))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

"""What we depend on: the lock file, the lower bounds, and no network."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
import warnings

import pytest
from helpers import ROOT, TINY, with_path
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
ENTRY = re.compile(
    r"^([a-z0-9.-]+)==([^ ;\\]+)(?: ; ([^\\]+))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)
PYTHONS = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
PLATFORMS = {"linux": "x86_64", "darwin": "arm64", "win32": "AMD64"}


def wanted(extra):
    """Return the requirements of an extra, those of the extras it names included."""
    found = []
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            found += [one for name in sorted(requirement.extras) for one in wanted(name)]
        else:
            found.append(requirement)
    return found


NEEDED = [*map(Requirement, PROJECT["dependencies"]), *wanted("dev")]
ALL = [*NEEDED, *(one for extra in EXTRAS for one in wanted(extra))]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_holds_one_version_of_each_that_we_ask_for(python, platform):
    """`make lock` renews it."""
    here = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": platform,
        "platform_machine": PLATFORMS[platform],
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    locked = {}
    for name, version, marker, _ in ENTRY.findall(LOCK):
        if not marker or Marker(marker).evaluate(here):
            assert name not in locked, f"{name}: {locked[name]} and {version}"
            locked[name] = version
    for requirement in NEEDED:
        version = locked.get(requirement.name.lower().replace("_", "-"))
        assert version and version in requirement.specifier, f"{requirement}: {version}, run `make lock`"


def test_the_lock_is_for_everyone():
    """Each line is an entry with hashes: no version of one machine alone ("+cpu"), no index, no address."""
    rest = [line for line in ENTRY.sub("", LOCK).splitlines() if line and not line.lstrip().startswith("#")]
    assert not rest
    assert not re.search(r"://|file:", LOCK)
    assert not [entry for entry in ENTRY.findall(LOCK) if Version(entry[1]).local]


def test_every_requirement_has_a_lower_bound():
    assert not [str(one) for one in ALL if not {"==", ">="} & {bound.operator for bound in one.specifier}]


# Ends a process that names or calls a host, with a status that no `except` can hide, and its children as well.
NO_NETWORK = """
import os, sys
CALLS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto")
def refuse(event, args):
    if event in CALLS and not isinstance(args[-1], (str, bytes)) or event in CALLS[1:4]:
        os.write(2, f"network: {event} {args}\\n".encode())
        os._exit(77)
sys.addaudithook(refuse)
"""
# imports every module, and trains an agent and a network on sets
ALL_OF_IT = """
import importlib, pathlib, pkgutil, sys
import noisy_envs
names = [found.name for found in pkgutil.walk_packages(noisy_envs.__path__, "noisy_envs.")]
for folder in map(pathlib.Path, sys.argv[1:]):
    sys.path.insert(0, str(folder))
    names += sorted(path.stem for path in folder.glob("*.py"))
for name in names:
    if "triton" not in name:  # a package that torch for a CPU does not bring
        importlib.import_module(name)
assert len(names) > 50
noisy_envs.training.main.main(sys.modules["ppo_adapool"], TINY + ["--total-timesteps", "128"])
sets = {"--num-sets": 60, "--num-vectors": 6, "--epochs": 1, "--seeds": 1, "--pooling": "avgpool", "--out": "out"}
sys.modules["aggregation"].main([str(word) for pair in sets.items() for word in pair])
"""


def cut_off(tmp_path, *words):
    """Run Python where a call to a host ends it."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    env = {name: value for name, value in with_path(tmp_path, ROOT).items() if "proxy" not in name.lower()}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)


def test_a_call_to_a_host_is_noticed(tmp_path):
    code = """
import socket
try:
    socket.create_connection(("localhost", 9), timeout=0.1)
except OSError:
    pass
"""
    done = cut_off(tmp_path, "-c", code)
    assert done.returncode == 77 and done.stderr.startswith("network: socket.getaddrinfo ('localhost', 9")


@pytest.mark.process
def test_neither_import_nor_training_calls_a_host(tmp_path):
    for name in ("tyro", "torch", "sklearn"):
        pytest.importorskip(name)
    done = cut_off(tmp_path, "-c", f"TINY = {TINY}\n{ALL_OF_IT}", ROOT / "agents", ROOT / "supervised")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/curve.png")) and (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize("module", ["torch.jit._script", "torch._dynamo.variables.builder", "triton.language"])
def test_a_package_may_deprecate_what_it_uses_itself(module):
    warnings.warn_explicit("torch.jit.script_method is deprecated", DeprecationWarning, f"{module}.py", 1, module)


@pytest.mark.parametrize("module", ["noisy_envs.nn.pooling", "ppo_adapool", "torchlike"])
def test_what_we_use_must_not_be_deprecated(module):
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("torch.jit.script is deprecated", DeprecationWarning, f"{module}.py", 1, module)


def test_every_file_that_asks_for_a_gpu_is_run_on_one():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    (listed,) = re.findall(r"^GPU_TESTS := \$\(addprefix tests/,(.*)\)$", makefile, re.MULTILINE)
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_supply.py"]
    asking = {path for path in tests if "cuda.is_available()" in path.read_text(encoding="utf-8")}
    assert asking
    run = [ROOT / "tests" / name for name in listed.split()]
    assert all(any(path.is_relative_to(place) for place in run) for path in asking)


def imports_of(path, modules):
    """Return which of the modules a file imports, in functions too, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    left_out = {id(inner) for node in for_types for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in left_out:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def test_no_import_is_circular():
    package = ROOT / "noisy_envs"
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 100
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_each_folder_says_what_belongs_there_and_the_root_holds_ten_modules_at_most():
    package = ROOT / "noisy_envs"
    assert len(list(package.glob("*.py"))) <= 10
    for folder in (path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))

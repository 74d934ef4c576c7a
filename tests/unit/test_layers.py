"""Imports run downwards only, and importing the package starts nothing."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mpiquant"

# Each module may import those of its own line and of the lines below.
LAYERS = (
    ("cli", "torch"),
    ("wrap", "gradients"),
    ("api",),
    ("quick",),
    ("buckets", "request"),
    ("calls", "progress"),
    ("sparse", "hierarchical", "swap", "auto"),
    ("_call", "adaptive", "coded"),
    ("_comm", "execute", "_buffers", "planner"),
    ("finals", "sim"),
    ("job",),
    ("program", "parts", "_agreement", "_control"),
    ("plan", "feedback", "stats", "pool", "links"),
    ("config",),
    ("collectives",),
    ("codecs", "rate"),
    ("_kernels", "errors", "trace", "typing"),
)
HEIGHT = {name: len(LAYERS) - i for i, layer in enumerate(LAYERS) for name in layer}
WITHOUT_MPI = (
    "codecs",
    "plan",
    "planner",
    "program",
    "execute",
    "adaptive",
    "coded",
    "parts",
    "links",
    "collectives",
    "rate",
    "config",
    "feedback",
    "stats",
    "pool",
    "finals",
    "trace",
    "sim",
)


def runtime_imports(path):
    """Names of the modules that a file imports when it is imported or run."""
    tree = ast.parse(path.read_text())
    skipped = {
        node
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "mpiquant":
            yield from (f"mpiquant.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def modules():
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def test_imports_run_downwards():
    for name, path in modules():
        for imported in runtime_imports(path):
            parts = imported.split(".")
            if parts[0] == "mpiquant" and len(parts) > 1 and parts[1] in HEIGHT:
                assert HEIGHT[parts[1]] <= HEIGHT[name], f"{path.name} imports {imported}"


def test_lower_layers_know_no_mpi():
    for name, path in modules():
        if name in WITHOUT_MPI:
            assert not any(i.startswith("mpi4py") for i in runtime_imports(path)), path


def test_schedules_know_integers_only():
    for name, path in modules():
        if name == "collectives" and path.stem != "coding":  # which is mathematics, no schedule
            for imported in runtime_imports(path):
                assert imported.split(".")[0] in {*sys.stdlib_module_names, "mpiquant"}, path


def test_importing_starts_nothing():
    """No MPI call, no fork, no process: also on a login node without MPI."""
    code = """
import os, subprocess, sys
def refuse(*a, **k): raise AssertionError("started something")
os.fork = subprocess.Popen = refuse
sys.modules["mpi4py"] = None
import mpiquant, mpiquant.codecs, mpiquant.program, mpiquant.plan
mpiquant.UniformCodec(bits=4), mpiquant.ErrorFeedback(), mpiquant.options
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

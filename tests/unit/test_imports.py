"""What importing this package promises. Each promise is tried in an interpreter of its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hyperstate

ROOT = Path(hyperstate.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
FRAMEWORKS = {
    "torch",
    "mindspore",
    "numpy",
    "safetensors",
    "hyperstate_torch",
    "hyperstate_numpy",
    "hyperstate_mindspore",
}
COMMAND_LINE = {"rich", "typer"}
TIMEOUT_S = 60


def module_of(path):
    parts = ("hyperstate", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run(script, *arguments):
    """The JSON that a script prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def imported(script):
    """The modules that a script adds to those of a bare interpreter."""
    after = "print(json.dumps(sorted(set(sys.modules) - before)))"
    return set(run(f"import json, sys\nbefore = set(sys.modules)\n{script}\n{after}"))


def test_importing_the_package_imports_no_framework_and_little_else():
    found = imported("import hyperstate")
    assert {"hyperstate"} == {name for name in found if name.startswith("hyperstate")}
    assert len(found) < 20


def test_using_every_public_name_imports_no_framework_and_no_command_line():
    found = imported("import hyperstate\nfor name in hyperstate.__all__:\n    getattr(hyperstate, name)")
    assert "hyperstate.setters" in found
    assert set() == {name.split(".")[0] for name in found} & (FRAMEWORKS | COMMAND_LINE)
    assert len(found) < 200


def test_pure_work_imports_no_framework():
    found = imported(
        "import hyperstate\n"
        "hyperstate.flatten_optim_state_dict({'state': {'w': {'step': 1}}, 'param_groups': []})\n"
        "hyperstate.StateDictOptions(full_state_dict=True)\n"
        "from hyperstate import backend\n"
        "backend.installed()\n"
        "try:\n    backend.choose(3)\nexcept hyperstate.BackendError:\n    pass"
    )
    assert set() == {name.split(".")[0] for name in found} & FRAMEWORKS


def test_importing_writes_no_file_starts_no_process_and_opens_no_socket():
    script = """
import json, sys
events = []
def hook(name, arguments):
    if name.split(".")[0] in ("socket", "subprocess") or name in ("os.mkdir", "os.remove", "os.rename", "os.putenv"):
        events.append(name)
    if name == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        events.append(f"open {arguments[0]}")
sys.addaudithook(hook)
import hyperstate
for name in hyperstate.__all__:
    getattr(hyperstate, name)
print(json.dumps(events))
"""
    assert [] == run(script)


def test_each_module_of_the_core_can_be_imported_first():
    script = """
import importlib, json, sys
failures = {}
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.split(".")[0] == "hyperstate"]:
        del sys.modules[module]
    try:
        importlib.import_module(name)
    except ImportError as error:
        failures[name] = repr(error)
print(json.dumps(failures))
"""
    # Optional modules of the command line need rich and typer, which a plain installation has.
    assert {} == run(script, *[module_of(path) for path in SOURCES if path.name != "__main__.py"])


def outside_names(path):
    """First words of all absolute imports of a file, wherever in the file they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_the_core_imports_the_standard_library_alone(path):
    allowed = {*sys.stdlib_module_names, "hyperstate"}
    if module_of(path).startswith("hyperstate.cli"):
        allowed |= COMMAND_LINE
    if module_of(path) == "hyperstate.checkpoint.storage":
        allowed.add("fsspec")  # an extra: imported where a URL is given, and nowhere else
    if module_of(path) == "hyperstate.checkpoint.checksum":
        allowed.add("isal")  # optional: zlib takes its place
    assert set() == outside_names(path) - allowed


def test_the_test_above_sees_late_imports(tmp_path):
    file = tmp_path / "late.py"
    file.write_text("import os.path\ndef f():\n    if 1:\n        from torch.nn import Linear\n    from . import x\n")
    assert {"os", "torch"} == outside_names(file)


def test_all_lists_the_public_names_in_order_and_each_can_be_had():
    assert sorted(hyperstate.__all__) == hyperstate.__all__
    assert hyperstate.__all__ == dir(hyperstate)
    for name in hyperstate.__all__:
        assert name == getattr(hyperstate, name).__name__
    with pytest.raises(AttributeError, match="no attribute 'get_modle_state_dict'"):
        _ = hyperstate.get_modle_state_dict


def test_type_checkers_and_programs_see_the_same_names():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {(f"hyperstate.{node.module}", alias.name) for node in checked.body for alias in node.names}
    homes = {(f"hyperstate.{home}", name) for home, names in hyperstate._HOMES.items() for name in names}
    assert homes == seen
    assert hyperstate.__all__ == sorted(name for _, name in homes)


def test_every_error_that_a_user_can_see_is_public():
    from hyperstate import errors

    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert classes <= set(hyperstate.__all__)


def test_the_package_is_marked_as_typed():
    assert (ROOT / "py.typed").is_file()

"""Which backend serves a call. Third-party backends are real packages on a path of their own."""

from __future__ import annotations

import sys
import textwrap

import pytest

from hyperstate import BackendError, backend, use_backend

MODULE = """
    class Model:
        pass

    class Backend:
        name = "{name}"

        def owns(self, value):
            return isinstance(value, Model)

    def backend():
        return Backend()
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(backend, "_loaded", {})
    monkeypatch.delenv(backend.VARIABLE, raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package on the path that registers a backend: ``install(name, source)``."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def add(name, source=MODULE, package=None):
        package = package or name
        info = tmp_path / f"{package}_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{backend.GROUP}]\n{name} = {package}:backend\n")
        (tmp_path / f"{package}.py").write_text(textwrap.dedent(source.format(name=name)))
        return package

    yield add
    for name in set(sys.modules) - before:
        sys.modules.pop(name)


def test_a_third_party_backend_is_found_by_its_entry_point(install):
    install("jelly")
    assert "jelly" in backend.installed()
    assert "jelly" == backend.load("jelly").name
    assert backend.load("jelly") is backend.load("jelly")


def test_an_unknown_name_is_refused_with_the_names_that_there_are(install, monkeypatch):
    install("jelly")
    with pytest.raises(BackendError, match=r"no backend 'pytorhc'; registered are: .*jelly.*numpy.*torch"):
        backend.load("pytorhc")
    monkeypatch.setenv(backend.VARIABLE, "pytorhc")
    with pytest.raises(BackendError, match="pytorhc"):
        backend.choose(object())
    with pytest.raises(BackendError, match="pytorhc"), use_backend("pytorhc"):
        pass


def test_two_packages_that_claim_one_name_are_refused(install):
    install("jelly")
    install("jelly", package="other_jelly")
    with pytest.raises(
        BackendError, match=r"2 packages register a backend 'jelly': \['.*jelly:backend', '.*jelly:backend'\]"
    ):
        backend.load("jelly")


def test_a_missing_framework_is_an_error_with_the_line_that_installs_it(install):
    install("jelly", "import jelly_framework\n")
    monkeyed = {**backend._FRAMEWORKS, "jelly": "jelly_framework"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_FRAMEWORKS", monkeyed)
        with pytest.raises(BackendError, match=r"pip install 'hyperstate-dist\[jelly\]'"):
            backend.load("jelly")


def test_a_backend_whose_own_import_is_broken_says_so_itself(install):
    """It is not the framework that is missing, so no advice to install it."""
    install("jelly", "import a_module_that_the_author_forgot\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_the_author_forgot"):
        backend.load("jelly")


def test_the_type_of_the_object_decides_once_its_framework_is_imported(install):
    import_module = __import__(install("jelly"))
    model = import_module.Model()
    assert "jelly" == backend.choose(model).name
    assert "jelly" == backend.choose(None, model).name


def test_a_backend_that_another_thread_loads_meanwhile_is_found(install, monkeypatch):
    model = __import__(install("jelly", package="jellies")).Model()
    points = backend.metadata.entry_points

    def late(**which):
        monkeypatch.setattr(backend.metadata, "entry_points", points)
        backend.load("jelly")
        return points(**which)

    monkeypatch.setattr(backend.metadata, "entry_points", late)
    assert "jelly" == backend.choose(model).name


def test_choosing_imports_no_framework_that_the_script_has_not_imported(install):
    install("jelly")
    with pytest.raises(BackendError, match="no backend serves list"):
        backend.choose([])
    assert "jelly" not in sys.modules


def test_an_object_of_nobody_is_refused_with_what_can_be_done(install):
    install("jelly")
    with pytest.raises(BackendError, match=rf"serves int; set {backend.VARIABLE} to one of: .*jelly.*pip install"):
        backend.choose(3)


def test_the_variable_decides_without_any_object(install, monkeypatch):
    install("jelly")
    monkeypatch.setenv(backend.VARIABLE, "jelly")
    assert "jelly" == backend.choose().name
    assert "jelly" == backend.choose(None).name


def test_the_variable_and_an_object_of_another_backend_are_a_mismatch(install, monkeypatch):
    install("jelly")
    other = __import__(install("marmalade")).Model()
    monkeypatch.setenv(backend.VARIABLE, "jelly")
    with pytest.raises(
        BackendError, match="says 'jelly', but a Model belongs to the backend 'marmalade'.*registered are"
    ):
        backend.choose(other)
    with pytest.raises(BackendError, match="says 'jelly', but a int belongs to no installed backend"):
        backend.choose(3)


def test_use_backend_wins_over_the_variable_and_ends_with_its_block(install, monkeypatch):
    install("jelly")
    install("marmalade")
    monkeypatch.setenv(backend.VARIABLE, "jelly")
    with use_backend("marmalade") as outer:
        assert ("marmalade", "marmalade") == (outer.name, backend.choose().name)
        with use_backend("jelly"):
            assert "jelly" == backend.choose().name
        assert "marmalade" == backend.choose().name
    with pytest.raises(KeyError), use_backend("marmalade"):
        raise KeyError
    assert "jelly" == backend.choose().name


def test_an_empty_variable_is_an_unset_one(install, monkeypatch):
    model = __import__(install("jelly")).Model()
    monkeypatch.setenv(backend.VARIABLE, "")
    assert "jelly" == backend.choose(model).name

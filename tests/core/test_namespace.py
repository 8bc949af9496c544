"""Public names are listed once, complete, and imported one by one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fedspan
from fedspan.core import catalog, registry
from fedspan.core.namespace import listed

NAMESPACES = {
    kind: ".".join(folder.split(".")[:2])
    for kind, folder in catalog.FOLDERS.items()
    if kind != "task"
}


@pytest.mark.parametrize(("kind", "package"), NAMESPACES.items())
def test_a_namespace_has_every_choice_of_its_kind(kind: str, package: str) -> None:
    namespace = importlib.import_module(package)
    assert package.removeprefix("fedspan.") in fedspan.__all__
    known = {
        cls.__name__: cls
        for cls in registry.choices(kind).values()
        if cls.__module__.startswith("fedspan.")
    }
    assert set(known) <= set(namespace.__all__)
    for name, cls in known.items():
        assert getattr(namespace, name) is cls
        assert name in dir(namespace)


@pytest.mark.parametrize("package", ["fedspan", *sorted({*NAMESPACES.values()})])
def test_every_listed_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == set(listed(package))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing


@pytest.mark.parametrize("package", ["fedspan", *sorted({*NAMESPACES.values()})])
def test_tab_completion_shows_the_api_and_nothing_else(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in dir(module) if not name.startswith("__")] == sorted(module.__all__)


def test_a_name_imports_its_own_file_only() -> None:
    code = (
        "import sys, fedspan, fedspan.methods\n"
        "assert 'torch' not in sys.modules and dir(fedspan.methods) and fedspan.methods.__all__\n"
        "assert not [name for name in sys.modules if name.startswith('fedspan.methods.')]\n"
        "fedspan.methods.FedAvg\n"
        "assert 'fedspan.methods.fedavg' in sys.modules and 'fedspan.methods.ssf' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

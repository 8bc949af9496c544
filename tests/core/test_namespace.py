"""Public names are listed once, complete, and imported one by one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fedspan
from fedspan.core import registry
from fedspan.core.namespace import listed

FOLDERS = sorted({kind.folder for kind in registry.KINDS.values()} & {f"fedspan.{name}" for name in fedspan.__all__})


@pytest.mark.parametrize("kind", [kind for kind, (_, folder) in registry.KINDS.items() if folder in FOLDERS])
def test_a_namespace_has_every_choice_of_its_kind(kind: str) -> None:
    folder = importlib.import_module(registry.KINDS[kind].folder)
    known = {cls.__name__: cls for cls in registry.choices(kind).values() if cls.__module__.startswith("fedspan.")}
    base = {registry.KINDS[kind].base.__name__}  # a namespace may offer the base class of its kind too
    assert sorted(known) == sorted(set(folder.__all__) - base)
    for name, cls in known.items():
        assert getattr(folder, name) is cls
        assert name in dir(folder)


@pytest.mark.parametrize("package", ["fedspan", *FOLDERS])
def test_every_listed_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == set(listed(package))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing


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

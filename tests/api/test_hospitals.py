"""examples/hospitals.py gives FLamby's published numbers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedspan.data import datasets

EXAMPLE = Path(__file__).parents[2] / "examples/hospitals.py"
PUBLISHED = {  # flamby/results/results_benchmark_fed_tcga_brca, the rows "Pooled Test" of the seeds 42 to 46
    "FedAvg": (0.8025641, 0.4227106, 0.8080586, 0.8289377, 0.8142857),
    "SCAFFOLD": (0.6970696, 0.6578755, 0.7512821, 0.7091575, 0.6820513),
    "FedAdam": (0.8380952, 0.8208791, 0.8560440, 0.8619048, 0.8336996),
}


@pytest.fixture
def hospitals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hospitals", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_example(hospitals: ModuleType) -> None:
    command = [sys.executable, EXAMPLE, "--rounds", "1", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(r"^(\w+).* (0\.\d{3}) ± .* (\d\.\d\d) kB$", done.stdout, re.M)
    assert [name for name, _, _ in rows] == ["FedAvg", "SCAFFOLD", "FedAdam", "SSF"]
    assert [float(sent) for _, _, sent in rows] == [
        0.96,
        0.96,
        0.96,
        0.55,
    ]  # 6 regions of 40 numbers; 1 + 20 + 2 with SSF
    assert [score for name, score, _ in rows if name in ("FedAvg", "SCAFFOLD")] != [
        "0.500",
        "0.500",
    ]


def test_the_data_are_the_official_split(hospitals: ModuleType) -> None:
    train, test = datasets.tcga_brca()
    assert np.bincount(train.owner).tolist() == [248, 156, 164, 129, 129, 40]
    assert np.bincount(test.owner).tolist() == [63, 40, 42, 33, 33, 11]


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD"])
def test_one_seed_is_the_published_one(hospitals: ModuleType, name: str) -> None:
    method, _ = hospitals.METHODS[name]
    assert hospitals.train(method, 42).history[-1]["c_index"] == pytest.approx(
        PUBLISHED[name][0], abs=0.002
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_seed_is_the_published_one(hospitals: ModuleType, name: str) -> None:
    method, _ = hospitals.METHODS[name]
    found = [hospitals.train(method, seed).history[-1]["c_index"] for seed in hospitals.SEEDS]
    assert found == pytest.approx(PUBLISHED[name], abs=0.002)

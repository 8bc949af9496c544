"""Five methods at equal bytes, every one at its own step size, on ten clients that have few of the ten digits each."""

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedspan
from fedspan.compressors import QSGD
from fedspan.methods import SSF, DoubleSqueeze, FedAvg, Scaffold

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
rows = np.argsort(y[:1500].numpy(), kind="stable").reshape(10, -1)  # sorted by digit
clients = [(x[part], y[part]) for part in rows]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

bits = QSGD(bits=8, bucket=256)
methods = {
    "FedAvg": FedAvg(),
    "SCAFFOLD": Scaffold(),
    "DoubleSqueeze": DoubleSqueeze(),
    "SSF": SSF(rank=0.1),
    "SSF, 8 bits": SSF(rank=0.1, uplink=bits, downlink=bits),
}
comparison = fedspan.compare(
    methods, model, clients, test=(x[1500:], y[1500:]),
    tune={"lr": [0.1, 0.3, 1.0, 3.0]}, seeds=3, budget="total=10MB", eval_every=5, jobs=2,
)  # fmt: skip
print(comparison)
print("more in", comparison.page("out/quickstart/index.html"))
comparison.plot(x="total_bytes").figure.savefig("out/quickstart/accuracy.png", dpi=150)

"""FedAvg and SSF on ten clients, each with few of the ten digits."""

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedspan
from fedspan.methods import SSF, FedAvg

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
rows = np.argsort(y[:1500].numpy(), kind="stable").reshape(10, -1)  # sorted by digit
clients = [(x[part], y[part]) for part in rows]
test = (x[1500:], y[1500:])

for method in (FedAvg(lr=0.1), SSF(rank=0.2, lr=0.5)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    result = fedspan.fit(model, clients, method=method, rounds=60, test=test, eval_every=10)
    print(f"{type(method).__name__:8} {result}")

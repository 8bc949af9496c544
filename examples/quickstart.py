"""Handwritten digits over 10 clients with one or two digits each: FedAvg against SSF at a fifth of the directions."""

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedspan
from fedspan.methods import SSF, FedAvg
from fedspan.nn.models import mlp

digits = load_digits()
x, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
order = np.argsort(y[:1500].numpy(), kind="stable").reshape(10, -1)  # sorted by digit
clients = [(x[rows], y[rows]) for rows in order]
test = (x[1500:], y[1500:])

for method in (FedAvg(lr=0.1, local_steps=10), SSF(rank=0.2, lr=0.5, local_steps=10)):
    torch.manual_seed(0)
    result = fedspan.fit(mlp((1, 8, 8), 10), clients, method=method, rounds=60, test=test, eval_every=10)
    last = result.rows[-1]
    print(f"{type(method).__name__:8} accuracy {last['accuracy']:.3f}  {last['up_bytes'] / 1e6:.2f} MB up")

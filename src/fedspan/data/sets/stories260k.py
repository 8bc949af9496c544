"""A small pre-trained Llama in the format of llama2.c, written as a directory that transformers reads.

The weights follow a header of seven whole numbers, layer by layer for each kind. llama2.c turns pairs of neighbors by
the rotary embedding, transformers the two halves of a head, so the rows of query and key are put in that order. The
tokenizer's file has a score and the text of each token, merged tokens in the order of their merging.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from fedspan.core.extras import needs
from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents, File

FROM = "https://huggingface.co/karpathy/tinyllamas/resolve/main/stories260K/"
PLACE = "models/stories260k"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = len(SPECIAL) + 256  # tokens before those that are merged
Floats = npt.NDArray[np.float32]


def convert(files: Files) -> Contents:
    """The directory of the model: config, weights and tokenizer."""
    config, weights = _weights(files["stories260k/stories260K.bin"].read_bytes())
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {
        f"{PLACE}/config.json": json.dumps(config, indent=1).encode(),
        f"{PLACE}/tokenizer.json": _tokenizer(files["stories260k/tok512.bin"].read_bytes()),
        f"{PLACE}/tokenizer_config.json": json.dumps(named, indent=1).encode(),
        f"{PLACE}/model.safetensors": save(weights, {"format": "pt"}),
    }


def _weights(raw: bytes) -> tuple[dict[str, Any], dict[str, Floats]]:
    dim, hidden, layers, heads, kv_heads, vocab, longest = struct.unpack("<7i", raw[:28])
    if min(dim, hidden, layers, heads, kv_heads, vocab, longest) < 1 or dim % heads:
        raise ValueError("its head has sizes that no Llama has")
    numbers, at, size = np.frombuffer(raw, "<f4", offset=28), 0, dim // heads

    def take(*shape: int) -> Floats:
        nonlocal at
        start, at = at, at + math.prod(shape)
        return numbers[start:at].reshape(shape)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    for name, shape in {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * size, dim),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }.items():
        for layer, rows in enumerate(take(layers, *shape)):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):  # neighbors to halves
                rows = rows.reshape(-1, size // 2, 2, dim).swapaxes(1, 2).reshape(-1, dim)
            weights[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(rows)
    weights["model.norm.weight"] = take(dim)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "max_position_embeddings": longest, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    return config, weights


def _tokenizer(raw: bytes) -> bytes:
    needs("nlp", "tokenizers")
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    tokens, at = [], 4  # after the length of the longest one
    while at < len(raw):
        _, length = struct.unpack("<fi", raw[at : at + 8])
        tokens.append(raw[at + 8 : at + 8 + length].decode().replace(" ", "▁"))
        at += 8 + length
    numbers = {text: number for number, text in enumerate([*SPECIAL, *tokens[len(SPECIAL) :]])}
    merges = [
        (text[:cut], text[cut:])
        for text, number in numbers.items()
        for cut in range(1, len(text))
        if number >= BYTES and text[:cut] in numbers and text[cut:] in numbers
    ]
    unknown: dict[str, Any] = {"unk_token": SPECIAL[0], "fuse_unk": True, "byte_fallback": True}
    made: Any = Tokenizer(models.BPE(numbers, merges, **unknown))
    made.add_special_tokens(SPECIAL)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    text: str = made.to_str(pretty=True)
    return text.encode()


SETS = (DataSet(
    name="stories260k",
    about="model: a Llama of 260,032 parameters, pre-trained on children's stories",
    clients="-",
    licence="MIT",
    source="https://huggingface.co/karpathy/tinyllamas",
    size=1_070_000,
    made=tuple(f"{PLACE}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
    files=(
        File(
            "stories260k/stories260K.bin", (f"{FROM}stories260K.bin",),
            "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696", 1056540,
        ),
        File(
            "stories260k/tok512.bin", (f"{FROM}tok512.bin",),
            "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312", 6227,
        ),
    ),
    convert=convert,
),)  # fmt: skip

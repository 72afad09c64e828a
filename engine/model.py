"""Llama models without files: a config.json, and weights made while loading.

Runs in the engine's python. Weights are a function of each tensor's name, so they are the
same in every process, and whole tensors are handed to vLLM, which gives each rank its own
part. The output head is not tied to the embeddings: tied, such a model only repeats its
last token, and could not notice wrong KV.

`model.py DIRECTORY SHAPE` writes such a model with files, as users have them, and
`model.py DIRECTORY SHAPE SEED` a LoRA adapter for it.
"""

from __future__ import annotations

import importlib
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

LOAD_FORMAT = "seeded"

LORA_RANK = 8

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16000,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "initializer_range": 0.02,
}

SHAPES: dict[str, dict[str, object]] = {
    # 16 KiB of KV a token and layer pair: 128 KiB a block of 32, starts fastest.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # 222 M parameters, 64 KiB of KV a token: computing a prefix costs seconds on two cores.
    "demo": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    # Five layers of each six attend to the last 96 tokens only: several KV cache groups.
    "windows": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 64,
        "sliding_window": 96,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
}


def write_config(directory: Path, shape: str) -> None:
    """Make `directory` a model of one of SHAPES, without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**_COMMON, **SHAPES[shape]}, indent=1, sort_keys=True)
    (directory / "config.json").write_text(text, encoding="utf-8")


def write_weights(directory: Path, shape: str) -> None:
    """Make `directory` a model with its weights and a tokenizer of words w0, w1 and so on."""
    save_file = importlib.import_module("safetensors.torch").save_file
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")

    write_config(directory, shape)
    config = SimpleNamespace(**_COMMON, **SHAPES[shape])
    save_file(dict(_weights(config)), directory / "model.safetensors", {"format": "pt"})
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(directory)


def write_adapter(directory: Path, shape: str, seed: int) -> None:
    """Make `directory` a LoRA adapter for a model of one of SHAPES, which changes all KV."""
    torch = importlib.import_module("torch")
    save_file = importlib.import_module("safetensors.torch").save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = SimpleNamespace(**_COMMON, **SHAPES[shape])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(config.num_hidden_layers):
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("v_proj", config.num_key_value_heads),
        ):
            name = f"base_model.model.model.layers.{index}.self_attn.{projection}"
            down = torch.randn(LORA_RANK, config.hidden_size, generator=generator)
            up = torch.randn(heads * config.head_dim, LORA_RANK, generator=generator)
            tensors[f"{name}.lora_A.weight"] = down * config.hidden_size**-0.5
            tensors[f"{name}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")


def register() -> None:
    """Make LOAD_FORMAT known to vLLM in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class SeededLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is untyped here
        def download_model(self, model_config):
            """Nothing to fetch."""

        def load_weights(self, model, model_config):
            if model_config.hf_config.model_type == "llama":
                model.load_weights(_weights(model_config.hf_config))
            else:
                _fill(model)


def _fill(model):
    """Fill the parameters of a model that is whole in this process, each by its name."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            # Weights of norms, to which Gemma adds 1.
            parameter.data.zero_()
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        gain = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=generator) * gain
        parameter.data.copy_(values)


def _weights(config):
    """(name, tensor) of every weight of a Llama, by its published name."""
    import torch

    def normal(name, rows, columns, gain):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return name, torch.randn(rows, columns, generator=generator) * gain

    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield normal("model.embed_tokens.weight", config.vocab_size, hidden, 1.0)
    yield normal("lm_head.weight", config.vocab_size, hidden, hidden**-0.5)
    yield "model.norm.weight", torch.ones(hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", torch.ones(hidden)
        yield layer + "post_attention_layernorm.weight", torch.ones(hidden)
        attention = layer + "self_attn."
        yield normal(attention + "q_proj.weight", queries, hidden, 2 * hidden**-0.5)
        yield normal(attention + "k_proj.weight", keys, hidden, 2 * hidden**-0.5)
        yield normal(attention + "v_proj.weight", keys, hidden, 2 * hidden**-0.5)
        yield normal(attention + "o_proj.weight", hidden, queries, 2 * queries**-0.5)
        yield normal(layer + "mlp.gate_proj.weight", inner, hidden, hidden**-0.5)
        yield normal(layer + "mlp.up_proj.weight", inner, hidden, hidden**-0.5)
        yield normal(layer + "mlp.down_proj.weight", hidden, inner, inner**-0.5)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        write_adapter(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        write_weights(Path(sys.argv[1]), sys.argv[2])

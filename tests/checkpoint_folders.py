"""A tiny random checkpoint folder with the embedded model's tokenizer, as transformers saves one."""

from __future__ import annotations

from pathlib import Path


def tiny_folder(path: Path, gguf_file: Path) -> Path:
    """Write a two-layer model of about 13 MB; takes seconds."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path

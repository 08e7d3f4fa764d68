"""A small model that differs from the embedded one: SentencePiece, tokens of several digits, no chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WIDTH = 32
_SHAPES = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))


def sentencepiece_gguf(path: Path, *, without: bytes = b"", context: int = 4096, vocabulary: bool = True) -> Path:
    """Write a random one-layer model whose tokenizer puts a space before every text and joins `12`, as Llama 2's does.

    `without`: bytes that no token spells. `vocabulary`: whether it has a tokenizer at all.
    """
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(256) if byte not in without]
    pieces += [(chr(byte), NORMAL) for byte in range(33, 127) if byte not in without]
    pieces += [(text, NORMAL) for text in ("\u2581", "\u2581late", "action", "DENY", "12")]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(pieces))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if vocabulary:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _ in pieces])
        writer.add_token_scores([-float(rank) for rank in range(len(pieces))])
        writer.add_token_types([kind for _, kind in pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    rng = np.random.default_rng(1)
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(pieces), WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name, shape in _SHAPES.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal(shape, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

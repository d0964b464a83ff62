"""Small models of several kinds, as the configurations of transformers, for engines on a CPU or a GPU."""

from __future__ import annotations

from typing import Any

COMMON = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
WINDOWS = {
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2,
    "num_hidden_layers": 6,
    "sliding_window": 200,
    **HEADS,
}
MLA = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
INDEXER = {"q_lora_rank": 256, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4, **HEADS},
    "gemma": {"model_type": "gemma3_text", **WINDOWS},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "mla": {"model_type": "deepseek_v2", **MLA},
    "deepseek-v32": {"model_type": "deepseek_v32", "topk_method": "noaux_tc", **MLA, **INDEXER},
    "granite": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "mamba_chunk_size": 64,
        **MAMBA,
        **HEADS,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        **HEADS,
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
        "mlp_hidden_act": "relu2",
        **HEADS,
    },
}
STATES = ("granite", "qwen3-next", "nemotron")  # only on a GPU

"""LLaMA, Qwen2 and Qwen3 with routed heads (Jin 2024, section 4.4)."""

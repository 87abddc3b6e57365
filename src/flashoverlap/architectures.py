"""The language models of transformers that ``plan="auto"`` knows, by the ``model_type`` of their configuration.

Their tables are in torch/plans.py; here are the names alone, for whoever refuses others before torch is loaded.
"""

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2")

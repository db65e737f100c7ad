"""Parameters on disk: safetensors by Hugging Face names, and Orbax checkpoints."""

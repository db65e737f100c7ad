"""Models: where they come from, how RoPE is set for the new length, and what is checked before training."""

"""Tasks for lm-eval: YAML files, and what they call."""

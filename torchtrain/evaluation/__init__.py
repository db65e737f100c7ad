"""What a trained model can do: RULER's tasks, perplexity by position, and the tables that compare runs."""

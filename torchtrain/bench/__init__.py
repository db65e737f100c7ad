"""`torchtrain bench`: time attention and training steps, and their alternatives."""

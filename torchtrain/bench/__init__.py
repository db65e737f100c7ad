"""`torchtrain bench`: time attention and training steps beside their alternatives."""

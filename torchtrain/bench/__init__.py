"""`torchtrain bench`: time attention and training steps against what people would use instead."""

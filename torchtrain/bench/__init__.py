"""`torchtrain bench`: what attention, a step and a GPU's memory give, beside what people would use instead."""

"""`torchtrain bench`: what attention, a step and a device's memory give, beside what people would use instead."""

"""`parity compare`: judge what any two engines wrote, by names, with an allowance that is derived."""

"""The precision study: which rounding breaks RoPE's invariance to shifts, where, and what it costs.

    jaxref study configs/study/demo.yaml --out runs/study

`spec` is the configuration, `schema` the results. `engine` runs a model and compares attention, out of the compiled
`pieces`; `measures` are the paper's. `conditions` names what is compared, `methods` holds what a `Rounding` cannot say.
`experiments` and `scores` say which `cells` are computed and what becomes of them; `run` keeps each finished one. JAX
alone: a GPU is used where JAX has one.
"""

"""The precision study: which rounding breaks RoPE's invariance to shifts, where, and what it costs.

    jaxref study configs/study/demo.yaml --out runs/study

`spec` is the configuration, `schema` the results. `compute` runs a model and compares attention; `experiments` say
which `cells` are computed and what becomes of them; `run` keeps each finished one; `report` shows them. JAX
alone: a GPU is used where JAX has one.
"""

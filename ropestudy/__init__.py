"""The precision study: which rounding breaks RoPE's invariance to shifts, where, and what it costs.

    jaxref study configs/study/demo.yaml --out runs/study

`spec` has the settings, `schema` the results. `run` goes through the `experiments`. Each asks for `cells`, which are
computed by `compute` and kept as files, and makes records of them. `report` shows the records. All of it uses JAX, on a
GPU where JAX has one.
"""

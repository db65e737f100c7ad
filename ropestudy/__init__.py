"""The precision study: which rounding breaks RoPE's invariance to shifts, where, and what it costs.

    jaxref study configs/study/demo.yaml --out runs/study

`spec` has the settings, `schema` the results. `run` runs the `experiments`. Each experiment asks for `cells` and makes
records of them. `compute` computes a cell, which is kept as a file. `report` shows the records. All of it uses JAX, on
a GPU if JAX has one.
"""

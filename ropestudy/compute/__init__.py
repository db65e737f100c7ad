"""What is computed of one row: `conditions` names what is compared, `methods` holds what a `Rounding` cannot say,
`engine` runs a model under several conditions out of the compiled `pieces`, and `measures` are the paper's.
"""

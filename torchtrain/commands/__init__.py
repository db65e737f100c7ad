"""The verbs of `torchtrain`: their arguments, and the calls of the packages that do the work."""

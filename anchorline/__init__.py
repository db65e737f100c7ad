"""The base package, which all others import: files, settings, errors, commands, and the error rule.

Apart from the rule (`tolerance`) it computes nothing. So the oracle, the trainer and the judge may share it: it cannot
make two of them wrong in the same way.
"""

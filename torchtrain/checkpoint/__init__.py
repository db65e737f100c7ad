"""What a run needs to go on after anything: checkpoints that are whole or not there, and the checks before they are
used.
"""

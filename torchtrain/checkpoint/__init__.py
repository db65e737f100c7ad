"""What a run needs to go on after anything: checkpoints, whole or not there, and checks before they are used."""

"""Anchorline's judge: the oracle and the trainer side by side. Only this package imports both."""

"""The three commands, for programs and tests that walk their verbs."""

import typer


def load_apps() -> dict[str, typer.Typer]:
    """Return the three commands by name."""
    import jaxref.cli
    import parity_tests.cli
    import torchtrain.cli

    return {"torchtrain": torchtrain.cli.app, "jaxref": jaxref.cli.load_app(), "parity": parity_tests.cli.app}

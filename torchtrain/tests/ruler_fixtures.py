"""What tests of RULER's generators share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_nouns():
    """Fewer nouns: lm-eval sorts every pair of an adjective and a noun when it is imported, for 8 seconds."""
    from wonderwords import random_word

    del random_word._DEFAULT_CATEGORIES[random_word.Defaults.NOUNS][700:]

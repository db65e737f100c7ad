"""What is written where something else belongs."""

import random
from typing import Any

import yaml

LONG = ("x" * 300, "x" * 5000)
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 1000, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 10**15, 10**18, 10**25, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-9, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")),
]
WORDS = [
    *("", " ", "x", "auto", "keep", "12:30", "é", "\U0001f680", "{domain}", "%s", *LONG),
    *("a\nb", "\x85", "\x1b[31m", "nul\0", "half \ud800"),
]
BOXES: list[Any] = [
    *([], {}, [1], [[]], ["x"], {"a": 1}, {"": 1}, [1.5] * 40, ["x"] * 3000, {"rope_type": "yarn"}, {"rope_type": "x"})
]
VALUES = [None, True, False, *NUMBERS, *WORDS, *BOXES]

PATHS = [
    *("", ".", "..", "/proc/x", "/dev/null/x", "/sys/x", "/proc/self/mem", "/dev/zero", "~nobody-at-all"),
    *("no/such", "a//b/../c", "é", "-x", "--x", "config.yaml", "loop", "pipe", "dangling", "model", "orbax"),
    *("a\0b", "a\ud800b", "a\nb", "x" * 300, "y/" * 2500),
]
TEXTS = [
    *("", "0", "1", "-1", "1e400", "nan", "inf", "-inf", "5e-324", "1e308", "0x10", "1_0", "x", "é", "١"),
    *("9" * 20, "9" * 25, "9" * 5000, "x" * 5000, "a\0b", "\ud800", "\n"),
    *("a,b", ",", "1,2", "1,", "1,-1", "0,0", "1," * 3000 + "1", "anchor", "full+tag", "+"),
    *("yarn", "llama3", "longrope", "linear", "ntk", "dynamic", "paper-32k", "smollm2", "bfloat16"),
]
YAML_TEXTS = [
    *("[", "{", "!!int ''", "!!timestamp abc", "!!python/name:os.system", "&a [*a]", "*a", "|", ">", "'", "%x", "@"),
    *("{[1]: 2}", "{a: 1, a: 2}", "<<: 1", "[" * 3000, '"\\ud800"', '"\\0"'),
    *("2026-11-30", "12:30", "0x_", "09", ".inf", "-.inf", ".nan", "~"),
]


def value_text(random: random.Random) -> str:
    """Return a value as YAML, or what is none."""
    if random.random() < 0.3:
        return random.choice(YAML_TEXTS)
    if random.random() < 0.3:
        return random.choice(PATHS)
    value = random.choice(VALUES)
    try:
        return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
    except yaml.YAMLError:
        return str(value)

"""The colours of a page, each with its name, in a light and in a dark scheme.

The style sheet holds them as custom properties (`--ink`). A drawing is made in the light ones and follows the scheme on
the page (`anchorline/page/svg.py`).
"""

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1d2125",
    "soft": "#5b646d",
    "line": "#dfe3e6",
    "shade": "#f5f7f8",
    "link": "#1f5f86",
    "good": "#1b6b4a",
    "bad": "#ad2417",
    "mixed": "#7a5a00",
    # lines and marks of a figure
    "series-0": "#1f5f86",
    "series-1": "#c2501d",
    "series-2": "#2c7a5b",
    "series-3": "#7a4ea3",
    "series-4": "#8a6d00",
    "series-5": "#b03a6b",
    "series-6": "#4a6573",
    "series-7": "#3b3bb5",
    # heat maps, little to much; the ink of the first four, of the last two
    "scale-0": "#f2f6f8",
    "scale-1": "#d9e7ee",
    "scale-2": "#b8d3e1",
    "scale-3": "#8fbad0",
    "scale-4": "#3d7ca0",
    "scale-5": "#245a7c",
    "scale-ink": "#14212b",
    "scale-ink-deep": "#fdfefe",
    # beyond what is allowed, little to much, each with its ink
    "over-0": "#f7c9a6",
    "over-0-ink": "#3a1700",
    "over-1": "#ec8f5f",
    "over-1-ink": "#2b0d00",
    "over-2": "#c23c1d",
    "over-2-ink": "#ffffff",
    "over-3": "#7a1410",
    "over-3-ink": "#ffffff",
}

DARK = {
    "paper": "#14171a",
    "ink": "#e4e8eb",
    "soft": "#9aa5ae",
    "line": "#2c3338",
    "shade": "#1b2024",
    "link": "#86bfe0",
    "good": "#6cc79d",
    "bad": "#ff8f7d",
    "mixed": "#e3bd57",
    "series-0": "#79b8e0",
    "series-1": "#f0915f",
    "series-2": "#6cc79d",
    "series-3": "#bd9be4",
    "series-4": "#d6b84a",
    "series-5": "#ee8db4",
    "series-6": "#a3b7c2",
    "series-7": "#9d9dff",
    "scale-0": "#1a2126",
    "scale-1": "#20303a",
    "scale-2": "#264250",
    "scale-3": "#2d5568",
    "scale-4": "#7fb4cf",
    "scale-5": "#b9dcec",
    "scale-ink": "#e8f0f4",
    "scale-ink-deep": "#0c1419",
    "over-0": "#6b3a16",
    "over-0-ink": "#ffeada",
    "over-1": "#97431a",
    "over-1-ink": "#ffffff",
    "over-2": "#dd5a34",
    "over-2-ink": "#1c0500",
    "over-3": "#ffa593",
    "over-3-ink": "#2b0300",
}

SERIES = tuple(LIGHT[f"series-{i}"] for i in range(8))
SCALE = tuple(LIGHT[f"scale-{i}"] for i in range(6))


# What a drawing may use, by its light value.
DRAWN = {
    LIGHT[name]: name
    for name in LIGHT
    if name in ("paper", "ink", "soft", "line") or name.startswith(("series", "scale"))
}


def custom_properties() -> str:
    """Return the top of the style sheet: both schemes. What is printed is light."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in scheme.items()) for scheme in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
    )

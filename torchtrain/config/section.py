"""What every section is made of: the strict base, and the kinds of values."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# RoPE takes positions in float32, which holds every whole number up to here.
MOST_TOKENS = 2**24

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Theta = Annotated[float, Field(gt=1, le=1e38)]  # the largest power of ten in float32, in which frequencies are computed
Stretch = Annotated[float, Field(ge=1e-6, le=MOST_TOKENS)]  # of positions, of which there are MOST_TOKENS
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
SmallCount = Annotated[int, Field(ge=1, le=2**16)]  # of what is at work at a time: more would not be addressable
Real = Annotated[float, Field(gt=0, le=1e30)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
PathText = Annotated[str, Field(min_length=1, max_length=4095)]  # characters: Linux takes no longer path


class Section(BaseModel):
    """Base of every section: no unknown keys, no silent conversions, no nan, nothing changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
